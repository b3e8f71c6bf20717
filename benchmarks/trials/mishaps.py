"""Mishaps of a run in one process: what happens to it, and what must be left of it."""

from __future__ import annotations

import resource
import shutil
import signal
import time

from lightning_fl.outputs.units import in_bytes
from trials.commands import Command, FindingError, require_same, rows
from trials.trial import Trial, grow, require_tidy, size_of

SILENT = ("round", "step", "comm/uplink_bits", "comm/downlink_bits", "time/simulated_seconds")
OF_SERVER = (
    "comm/setup_",
    "comm/total_",
    "comm/downlink_bits/",
    "val/",
    "test/",
    "model/",
    "privacy/",
    "prune/",
    "target/",
    "guard/",
    "moments/",
)
"""Columns that tell nothing of clients, and beginnings of such."""


def nothing(trial: Trial) -> None:
    """Run it, and go on with it after its end, which changes nothing."""
    whole = trial.whole()
    if whole is not None:
        shutil.copytree(whole, trial.folder / "again")
        trial.resume("again", whole)


def planned(trial: Trial) -> None:
    """Plan it, which must end as it does, with the same sentence; bytes that the plan calls exact must be those of the run."""
    whole = trial.whole()
    outcome = trial.end(trial.start("planned", "--dry_run"))
    if outcome != ("refused" if whole is None else "completed") or trial.sentence("planned") != trial.sentence("whole"):
        raise FindingError(
            f"the plan is {outcome}: {trial.sentence('planned')}; the fit says: {trial.sentence('whole')}"
        )
    if whole is None:
        return
    if (trial.folder / "planned").exists():
        raise FindingError("a plan has written something")
    sent = rows(whole / "metrics.csv")[-1:]
    for line in (trial.folder / "planned-output" / "stdout").read_text().splitlines():
        way, *numbers = line.split("  ")
        if way in ("uplink", "downlink") and sent and sent[0]["round"] == "2" and "about" not in numbers[-1]:
            count = in_bytes(float(sent[0][f"comm/total_{way}_bytes"]))
            if numbers[-1].strip() != count:
                raise FindingError(f"the plan calls {numbers[-1].strip()} of {way} exact, and {count} were sent")


def told_nothing(trial: Trial) -> None:
    """Drop side channels: no column tells of clients, whatever callbacks log, or the run is refused."""
    privacy = ["--trainer.privacy=ClientPrivacy", "--trainer.privacy.noise_multiplier=0"]
    trial.draw_accepted(*privacy, "--trainer.privacy.side_channels=drop")
    whole = trial.whole()
    if whole is None:
        return
    if (whole / "clients.csv").exists():
        raise FindingError("clients.csv tells of clients")
    names = {name for row in rows(whole / "metrics.csv") for name in row}
    if told := sorted(names - set(SILENT) - {name for name in names if name.startswith(OF_SERVER)}):
        raise FindingError(f"columns may tell of clients: {', '.join(told)}")


def killed(trial: Trial, by: int = signal.SIGKILL) -> None:
    """Kill it at any moment, perhaps twice, and resume it."""
    whole = trial.whole()
    if whole is None:
        return
    for turn in range(1 + trial.whole_numbers(2)):
        command = trial.start("killed", *(["--ckpt_path=last"] if turn else []))
        command.kill_after(trial.moment(), by)
        trial.end(command)
    trial.resume("killed", whole)


def terminated(trial: Trial) -> None:
    """End it with SIGTERM, as batch systems do, or SIGHUP, as a terminal that closes does."""
    killed(trial, trial.one_of(signal.SIGTERM, signal.SIGTERM, signal.SIGHUP))


def interrupted_twice(trial: Trial) -> None:
    """Press Ctrl-C, and once more while it stops, and resume it."""
    whole = trial.whole()
    if whole is None:
        return
    begun = trial.folder / "begun"

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it
        begun.touch()

    command = trial.start("interrupted", prepare=prepare)
    command.wait_until(begun.exists)
    command.kill_after(trial.moment(), signal.SIGINT)
    command.kill_after(10 ** trial.random.uniform(-4, -0.5), signal.SIGINT)
    trial.end(command)
    require_tidy(trial.folder / "interrupted")
    trial.resume("interrupted", whole)


def out_of_time(trial: Trial) -> None:
    """Let a timer stop it, and resume it, which changes nothing."""
    duration = f"--trainer.max_time=00:00:00:0{1 + trial.whole_numbers(2)}"
    trial.flags += ["--trainer.max_rounds=100000", duration]
    nothing(trial)


def small_files(trial: Trial) -> None:
    """Limit the size of files, as a full disk does, and resume it without the limit."""
    whole = trial.whole()
    if whole is None:
        return
    largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    limit = int(trial.random.uniform(4096, 1.2 * largest))  # the limit holds for the command's output, too

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    trial.end(trial.start("limited", prepare=prepare))
    require_tidy(trial.folder / "limited")
    trial.resume("limited", whole)


def full_disk(trial: Trial) -> None:
    """Run it on a small file system in memory, and resume it after that has grown; only root can make one."""
    whole = trial.whole()
    if whole is None:
        return
    with trial.small_disk("full", trial.whole_numbers(int(1.2 * size_of(whole)))) as disk:
        if disk is not None:
            trial.end(trial.start("full"))
            require_tidy(disk)
            grow(disk)
            trial.resume("full", whole)


def flipped_bit(trial: Trial) -> None:
    """Flip a bit in a file of its checkpoints, and resume it: that is refused, or harmless."""
    whole = trial.whole()
    if whole is None:
        return
    command = trial.start("flipped")
    trial.until_saved(command, "flipped")
    command.kill()
    trial.end(command)
    files = sorted(path for path in (trial.folder / "flipped" / "checkpoints").rglob("*") if path.stat().st_size)
    files = [path for path in files if path.is_file()]
    if not files:
        return
    path = files[trial.whole_numbers(len(files))]
    content = bytearray(path.read_bytes())
    content[trial.whole_numbers(len(content))] ^= 1 << trial.whole_numbers(8)
    path.write_bytes(content)
    if trial.end(trial.start("flipped", "--ckpt_path=last")) == "completed":
        require_same(whole, trial.folder / "flipped")
        trial.outcomes["resumed identically"] += 1


def two_in_one_folder(trial: Trial) -> None:
    """Start it a second time in the same folder while it runs: the second is refused, and the first not disturbed."""
    whole = trial.whole()
    if whole is None:
        return
    first = trial.start("shared")
    end = time.monotonic() + trial.moment()
    first.wait_until(lambda: time.monotonic() > end)
    ended_before = not first.is_running()
    second = Command.start(trial.command("shared"), trial.folder / "second-output")
    outcome, other = trial.end(second), trial.end(first)
    if other != "completed" and outcome != "completed":
        raise FindingError(f"the first run was {other}, the second {outcome}")
    if other == outcome == "completed" and not ended_before and not list((trial.folder / "shared").glob("earlier-*")):
        raise FindingError("both runs wrote into one folder")
    require_same(whole, trial.folder / "shared")
