"""Test private runs from the command line."""

from pathlib import Path

import pytest
import yaml
from command_line import Command

RUN = (
    *("fit", "--data", "Digits", "--data.num_clients", "20", "--data.image_size", "8", "--model", "ImageClassifier"),
    *("--model.network", "linear", "--trainer.max_rounds", "1", "--trainer.clients_per_round", "5"),
    *(
        "--trainer.enable_progress_bar",
        "false",
        "--trainer.enable_model_summary",
        "false",
        "--trainer.accelerator",
        "cpu",
    ),
)
FIXED = ("--trainer.privacy.clip", "0.5")
ADAPTIVE = ("--trainer.privacy.clip.quantile", "0.4")


@pytest.mark.parametrize(
    ("words", "clip"),
    [
        (("ClientPrivacy", *FIXED, "--trainer.privacy.noise_multiplier", "0"), 0.5),
        (("ClientPrivacy", "--trainer.privacy.noise_multiplier", "0", *ADAPTIVE), {"quantile": 0.4}),
        (("LocalPrivacy", *FIXED, "--trainer.privacy.noise_multiplier", "0"), 0.5),
    ],
)
def test_the_class_and_its_clip_are_flags(
    words: tuple[str, ...], clip: object, lightning_fl: Command, tmp_path: Path
) -> None:
    done = lightning_fl(*RUN, "--trainer.default_root_dir", str(tmp_path), "--trainer.privacy", *words)
    assert done.code == 0, done.err
    assert "privacy   none: clipped without noise" in done.out
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["privacy"]
    assert written["class_path"] == f"lightning_fl.features.privacy.{words[0]}"
    found = written["init_args"]["clip"]
    assert found == clip or found.items() >= clip.items()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("ClientPrivac",), "trainer.privacy 'ClientPrivac' is unknown; did you mean 'ClientPrivacy'?"),
        (("ClientPrivacy",), "privacy takes one of noise_multiplier and epsilon, got None and None"),
        (("ClientPrivacy", "--trainer.privacy.clip", "wide"), "clip of ClientPrivacy must be float or a mapping"),
        (("ClientPrivacy", "--trainer.privacy.noise", "1"), "ClientPrivacy has no parameter 'noise'"),
    ],
)
def test_mistakes_are_sentences(words: tuple[str, ...], sentence: str, lightning_fl: Command, tmp_path: Path) -> None:
    done = lightning_fl(*RUN, "--trainer.default_root_dir", str(tmp_path), "--trainer.privacy", *words)
    assert done.code == 2
    assert sentence in done.err
