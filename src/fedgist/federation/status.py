"""How a federation stands: who is there, since when, in which run; what went wrong last; when certificates end."""

from fedgist.federation import authority, membership, processes, records
from fedgist.federation.kits import FederationFolder
from fedgist.federation.protocol import roster
from fedgist.federation.records import Record

LAST = 5
"""Runs that are shown."""


def describe(federation: FederationFolder) -> list[str]:
    """It, a line for each thing, for a person."""
    up = processes.in_use(federation.server_kit)
    lines = [f"server {federation.server}:{federation.port}: {'running' if up else 'not running'}"]
    if (federation.path / roster.FILE).is_file():
        known = authority.load(federation)
        lines.append(f"roster {known.number} of {known.federation}, SHA-256 {known.digest[:16]}…")
    runs = records.load(federation.path)
    there = records.Presence(federation.path).load() if up else {}
    lines += [_site(site, there.get(site), runs) for site in federation.sites]
    lines += [_run(run) for run in runs[:LAST]]
    ends = membership.endings(federation)
    lines.append("certificates end: " + ", ".join(f"{one.who} {one.end:%Y-%m-%d}" for one in ends))
    return lines + [f"warning: {one.warning}" for one in ends if one.warning]


def _site(site: str, presence: tuple[bool, str] | None, runs: list[Record]) -> str:
    here, when = presence or (False, "")
    told = [f"site {site}: " + (f"{'here' if here else 'gone'} since {when}" if when else "not here")]
    told += [f"in run {run.name}" for run in runs if here and run.alive and site not in run.missing]
    told += [f"last left out of {run.name}: it {run.missing[site]}" for run in runs if site in run.missing][:1]
    return "; ".join(told)


def _run(run: Record) -> str:
    state = "killed" if run.state == records.RUNNING and not run.alive else run.state
    told = f"run {run.name}: {state}, round {run.round} of {run.rounds}, {run.heard}"
    return f"{told}: {run.error}" if run.error else told
