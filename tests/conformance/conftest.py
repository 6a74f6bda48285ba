"""Without NVFlare, as on many a machine with a GPU, the tests that go across a wire are left out."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("nvflare") else ["test_peers.py", "test_remote.py"]
