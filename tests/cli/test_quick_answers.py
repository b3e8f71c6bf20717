"""Test that what needs no run is answered without importing torch and Lightning, whose imports take seconds."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from made_runs import write_run

from lightning_fl.cli import commands, failures, main

PROGRAM = """
import atexit, sys
atexit.register(lambda: print(*{name.partition(".")[0] for name in sys.modules}))
from lightning_fl.cli import main
main()
"""
ANSWERS: dict[str, tuple[list[str], int, list[str]]] = {
    "version": (["--version"], 0, ["lightning-fl 0."]),
    "help": (
        ["--help"],
        0,
        ["--print_config", "commands:", "Train a model in a federation.", "report", "list", "init"],
    ),
    "help in short": (["-h"], 0, ["commands:"]),
    "help of fit": (["fit", "--help"], 0, ["--trainer.max_rounds INT", "OneCycleLR", "--ckpt_path"]),
    "help of predict, in short": (["predict", "-h"], 0, ["Run a model on the prediction data."]),
    "list": (["list"], 0, ["FedDUMAP", "lenet5", "Digits", "Dirichlet", "TargetReached"]),
    "list of a name": (["list", "FedDU"], 0, ["--algorithm.decay"]),
    "source of a method": (["list", "FedDU", "--source"], 0, ["class DynamicServerUpdate(Step)"]),
    "list of configurations": (["list", "configs"], 0, ["feddumap/cnn_cifar10"]),
    "init": (["init", "there", "--algorithm", "FedDU"], 0, ["lightning-fl fit --config there/experiment.yaml"]),
    "help of init": (["init", "--help"], 0, ["usage: lightning-fl init", "--overwrite"]),
    "mistyped name of a configuration": (["fit", "--config", "quikstart"], 2, ["did you mean 'quickstart'?"]),
    "help of list": (["list", "--help"], 0, ["usage: lightning-fl list"]),
    "help of report": (["report", "--help"], 0, ["--target"]),
    "report": (["report", "run"], 0, ["SCAFFOLD", "report/report.md"]),
    "report of nothing": (["report", "nowhere"], 2, ["no run in nowhere"]),
    "no command": ([], 2, ["no command is given", "fit", "report"]),
    "misspelt command": (["fitt"], 2, ["no command 'fitt'", "did you mean 'fit'"]),
    "misspelt flag": (["--verion"], 2, ["no flag --verion before the command", "did you mean '--version'"]),
    "flag before the command": (["--trainer.max_rounds=3", "fit"], 2, ["--trainer.max_rounds before the command"]),
    "two names for list": (["list", "data", "callbacks"], 2, ["list takes one name at most", "data callbacks"]),
    "no file": (["fit", "--config", "nope.yaml"], 2, ["--config: File does not exist:", "/nope.yaml'"]),
    "no file, in short": (["test", "-c", "nope.yaml"], 2, ["--config: File does not exist:", "/nope.yaml'"]),
    "no second file": (["fit", "--config=a.yaml", "--config=nope.yaml"], 2, ["File does not exist:", "/nope.yaml'"]),
    "no YAML": (["fit", "--config", "broken.yaml"], 2, ["broken.yaml is not valid YAML", "line 2"]),
    "a word": (["fit", "--config", "word.yaml"], 2, ["word.yaml must be a mapping", "hello"]),
}


@pytest.mark.process
@pytest.mark.parametrize(("words", "code", "said"), ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_without_a_run_does_without_torch(
    tmp_path: Path, words: list[str], code: int, said: list[str]
) -> None:
    for name, text in {"a": "trainer: {max_rounds: 1}", "broken": "trainer: [\n", "word": "hello"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    write_run(tmp_path / "run", [0.5, 0.6], "SCAFFOLD")
    bits = json.dumps({"rounds": 2, "uplink_bits": {"model": 32}, "downlink_bits": {"model": 32}})
    (tmp_path / "run" / "communication.json").write_text(bits)
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    *output, modules = done.stdout.splitlines()
    assert done.returncode == code, done.stderr
    printed = "\n".join(output) + done.stderr
    assert [text for text in said if text not in printed] == [], printed
    assert "Traceback" not in done.stderr
    assert not {"torch", "lightning", "torchmetrics", "jsonargparse"} & set(modules.split())


LIST = [sys.executable, "-c", "from lightning_fl.cli import main; main()", "list"]


def answered(redirection: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `lightning-fl list` with a redirection of the shell."""
    command, environment = f"{shlex.join(LIST)} {redirection}", {**os.environ, **variables}
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_the_output_may_end_early_be_closed_or_lack_characters() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    early = subprocess.run(LIST, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (early.returncode, early.stderr) == (141, "")
    for closed in ("2>&-", ">&-", "<&- >&- 2>&-"):
        done = answered(closed)
        assert (done.returncode, done.stderr) == (0, "")
    ascii_only = answered("", PYTHONIOENCODING="ascii")
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert "FedAvg" in ascii_only.stdout
    assert ascii_only.stdout.isascii()


@pytest.mark.matrix
def test_a_run_s_configuration_may_come_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Test that the early checks let pass what the parser allows: YAML in the command line, commands in files and variables."""
    monkeypatch.chdir(tmp_path)
    given = {"trainer": {"max_rounds": 7}, "model": "ImageClassifier", "data": "Digits"}
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("whole.yaml").write_text(yaml.safe_dump({"subcommand": "fit", "fit": given}))
    for name, words in {
        "": ["fit", "--config", yaml.safe_dump(given), "--print_config"],
        "PL_SUBCOMMAND": ["--print_config", f"--config={yaml.safe_dump({'fit': given})}"],
        "NOTHING": ["--config=~/whole.yaml", "--print_config"],
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["lightning-fl", *words])
            patch.setenv(name or "NOTHING", "fit")
            with pytest.raises(SystemExit) as ended:
                main()
        printed = capsys.readouterr()
        assert ended.value.code == 0, printed.err
        config = yaml.safe_load(printed.out)
        assert config.get("fit", config)["trainer"]["max_rounds"] == 7


def test_without_a_group_another_process_than_the_first_waits_and_names_its_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(failures.time, "sleep", lambda seconds: waited.append(seconds))
    monkeypatch.setattr(failures, "PATIENCE_S", 0.01)
    for rank, line in {"0": "error: wrong\n", "1": "error: on rank 1: wrong\n"}.items():
        monkeypatch.setenv("RANK", rank)
        failures.say_once("error: ", "wrong")
        assert capsys.readouterr().err == line
        assert bool(waited) == (rank == "1")


IMPORTS_TORCH = """
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Watch())
from lightning_fl.cli import main
main(["fit"])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "then"),
    [({}, "10000 None"), ({"GOMP_SPINCOUNT": "5"}, "5 None"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE")],
)
def test_threads_wait_briefly_unless_the_user_says_otherwise(given: dict[str, str], then: str) -> None:
    """Check the variables at the moment at which torch, which reads them, is imported."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", IMPORTS_TORCH]
    done = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[0] == then, done.stderr


def test_under_torchrun_the_first_process_has_long_to_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(failures.time, "sleep", lambda seconds: now.append(now.pop() + 1.0))
    monkeypatch.setenv("RANK", "1")
    for run_id, most in (("1", 60), (None, 3)):
        if run_id:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        else:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        began = now[0]
        failures.say_once("error: ", "wrong")
        assert capsys.readouterr().err == "error: on rank 1: wrong\n"
        assert now[0] - began == most


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("fit --config quickstart", "--ckpt_path last"),
        ("study fedldf_small", "the same command"),
        ("fit --help", ""),
        ("fit --algorithm.help FedDU", ""),
        ("fit --config quickstart --print_config=skip_default", ""),
        ("study fedldf_small --dry_run", ""),
        ("validate --config quickstart", ""),
        ("list", ""),
    ],
)
def test_only_what_trains_can_be_resumed(
    command: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in {KeyboardInterrupt: 130, BrokenPipeError: 141}.items():

        def stop(_: list[str], error: type[BaseException] = error) -> None:
            raise error

        monkeypatch.setattr(commands, "_answer_at_once", stop)
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        said = capsys.readouterr().err
        assert ended.value.code == code
        assert ("resume" in said) == bool(remedy)
        assert remedy in said
