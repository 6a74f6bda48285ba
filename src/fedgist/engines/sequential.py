"""One client after the other: the definition of the truth that every other engine must equal."""

from collections.abc import Sequence
from typing import Any

from fedgist.core.work import Place
from fedgist.engines.scheduler import Role, drive_one, gpu_arithmetic


class Sequential:
    name = "sequential"

    def __init__(self, place: Place = Place()):
        self.place = place

    def drive(self, roles: Sequence[Role]) -> list[Any]:
        try:
            with gpu_arithmetic(self.place):
                return [drive_one(role, self.place) for role in roles]
        finally:
            for role in roles:
                role.close()
