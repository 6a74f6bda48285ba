"""Features: fixed maps of images, public by a name and a seed, and sums of what they give, as work for `compute`."""

from fedgist.features.convolutions import Convolutions
from fedgist.features.feature_map import Beside, FeatureMap, drawn
from fedgist.features.fourier import Fourier
from fedgist.features.linear_model import LinearModel
from fedgist.features.maps import Ground, Sizes, build, from_text, learned, linear_model, usual
from fedgist.features.model_features import LearnedFeatures, ModelFeatures
from fedgist.features.moments import SHARES, Moments
from fedgist.features.scattering import Scattering
from fedgist.features.signals import SignalScattering

__all__ = [
    "SHARES",
    "Beside",
    "Convolutions",
    "FeatureMap",
    "Fourier",
    "Ground",
    "LearnedFeatures",
    "LinearModel",
    "ModelFeatures",
    "Moments",
    "Scattering",
    "SignalScattering",
    "Sizes",
    "build",
    "drawn",
    "from_text",
    "learned",
    "linear_model",
    "usual",
]
