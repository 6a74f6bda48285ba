"""The stacked engine: recognises equal work of many clients and runs it as one call; it may touch core and engines."""

from fedgist.engines.stacked.executor import Stacked

__all__ = ["Stacked"]
