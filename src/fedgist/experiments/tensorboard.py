"""Metrics for TensorBoard, for those who live there."""

from pathlib import Path
from typing import Any

from fedgist.core.errors import extra


class TensorBoard:
    """Writes every number of a round's row as a scalar; a resumed run replaces what came after its checkpoint."""

    def __init__(self, folder: Path):
        self.folder = folder
        with extra("--tensorboard needs tensorboard: pip install 'fedgist[tensorboard]'"):
            from torch.utils.tensorboard import SummaryWriter
        self.make: Any = SummaryWriter

    def start(self, title: str, done: int, rounds: int) -> None:
        self.writer = self.make(str(self.folder), purge_step=done + 1)

    def round(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "round" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()

    def stop(self) -> None:
        self.writer.close()
