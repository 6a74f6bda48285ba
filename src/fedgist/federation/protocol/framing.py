"""How who drives a run and a job that holds sites talk on one machine: a socket, and parts of bytes with their lengths.

Neither torch nor NVFlare is needed here: each end imports only what it needs itself.
"""

from io import BufferedRWPair

LINKS = "links"
"""In the server's kit: the name of the folder with the sockets of the jobs that hold sites.

It is a temporary one, as the name of a socket must be short, and only its user may enter it.
"""

HEARD = "heard"
"""In that folder: a file with the names of the sites that were heard of late, a line each."""


def write(stream: BufferedRWPair, *parts: bytes) -> None:
    for part in parts:
        stream.write(len(part).to_bytes(8, "little"))
        stream.write(part)
    stream.flush()


def read(stream: BufferedRWPair) -> bytes | None:
    """The next part; None when the other end has gone."""
    length = stream.read(8)
    if len(length) < 8:
        return None
    count = int.from_bytes(length, "little")
    data = stream.read(count)
    return data if len(data) == count else None
