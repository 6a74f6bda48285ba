"""The names that the author of a method needs, in one place; docs/writing-a-method.md shows them at work."""

# ruff: noqa: F401 (what is imported here is what others import from here)

from fedgist.core import tree
from fedgist.core.errors import FedgistError, MixedModels, unknown
from fedgist.core.federation import Answers, Federation, Site, State
from fedgist.core.message import Bounds, Done, Exactly, Params, float16, float32, float64, int64, message, uint8, wire
from fedgist.core.method import Method, handler
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Output, Samples, Task
from fedgist.core.tree import Tree
from fedgist.core.work import Chunks, compute, gradient, scan
from fedgist.dp.accountant import CLIENT, Release
from fedgist.dp.releases import Declared, NoisySteps, Sum, Sums
from fedgist.families.evaluation import EvaluateThis, EvaluateThisOnOwnLabels, over_clients, pooled_over_clients
from fedgist.families.global_model import (
    Global,
    GlobalModel,
    GlobalModelOptions,
    Local,
    SentWeights,
    average,
    check_updates,
    statistics_apart,
)
from fedgist.families.knowledge import Lesson, Taught, TaughtOptions, Train, Trained
from fedgist.families.label_logits import LogitOptions, tell, train_towards
from fedgist.families.local_training import (
    LocalOptions,
    TrainingOptions,
    bits_of,
    check_by_record,
    learner,
    moves_of,
    plan_of,
    pool_of,
    train,
    trainer,
)
from fedgist.families.own_heads import Head, OwnHeadOptions, OwnHeads
from fedgist.families.own_model import OwnModel, OwnModelOptions, one_feature_size
from fedgist.families.participation import active_option, client_weight, n_ref_option, weighted, weighting_option
from fedgist.families.private_training import PrivatelyTrained, check_noise, check_statistics
from fedgist.families.server_model import ServerModel
from fedgist.families.server_optimisers import AdaptiveServer
from fedgist.families.surrogate import (
    Current,
    Images,
    ImageTrained,
    ImageTrainingOptions,
    Surrogate,
    SurrogateOptions,
)
from fedgist.learning.evaluation import scores
from fedgist.learning.training import cross_entropy
from fedgist.options import Role, only_images, option
