"""What an honest but curious observer makes of a transcript: one function for each question, all of one form."""

from fedgist.privacy.attacks.classes import presence, shares
from fedgist.privacy.attacks.differencing import differencing
from fedgist.privacy.attacks.first_layer import first_layer
from fedgist.privacy.attacks.images import copied, image_membership
from fedgist.privacy.attacks.interface import Attack, Judge, Known, NothingToSee, Score
from fedgist.privacy.attacks.inversion import inversion
from fedgist.privacy.attacks.membership import membership, trajectory
from fedgist.privacy.attacks.moments import moment_membership, reconstruction

ATTACKS: dict[str, Attack] = {
    "inversion": inversion,
    "first layer": first_layer,
    "membership": membership,
    "trajectory": trajectory,
    "images": image_membership,
    "copies": copied,
    "moments": moment_membership,
    "reconstruction": reconstruction,
    "presence": presence,
    "shares": shares,
    "differencing": differencing,
}

__all__ = ["ATTACKS", "Attack", "Judge", "Known", "NothingToSee", "Score"]
