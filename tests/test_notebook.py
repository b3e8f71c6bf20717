"""Test a run in a notebook, which is executed: the bar, the table and the history."""

from pathlib import Path

import pytest

FIT = """
from lightning_fl import FederatedTrainer
from lightning_fl.data import Digits
from lightning_fl.modules import ImageClassifier

trainer = FederatedTrainer(max_rounds=3, clients_per_round=2, enable_model_summary=False, accelerator="cpu")
trainer.fit(ImageClassifier("linear", 10, in_channels=1, image_size=8), Digits(num_clients=5), "FedAvg")
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.process
def test_a_notebook_shows_the_bar_the_table_and_the_history(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="pip install 'lightning-fl[dev]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install 'lightning-fl[dev]'")
    from nbformat.v4 import new_code_cell, new_notebook

    notebook = new_notebook(cells=[new_code_cell(FIT), new_code_cell("trainer.history")])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    fitted, history = (cell.outputs for cell in notebook.cells)
    printed = "".join(output.text for output in fitted if output.output_type == "stream")
    assert "TqdmWarning" not in printed
    displayed = [output.data for output in fitted if output.output_type == "display_data"]
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        assert "Round 3/3: 100%" in printed
    else:
        assert any(WIDGET in data for data in displayed)
        state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
        texts = [str(model["state"].get("value")).replace("\u2007", " ") for model in state]
        assert "Round 3/3: 100%" in texts
        assert any("accuracy=" in text and "up=" in text for text in texts)
        assert "Round" not in printed, "no second bar as text"
    (table,) = [data for data in displayed if "text/html" in data]
    assert "<th style='text-align:left'>uplink</th>" in table["text/html"]
    assert "<svg" in table["text/html"]
    assert table["text/plain"].startswith("accuracy  0.")
    (shown,) = [output.data["text/html"] for output in history]
    assert "<svg" in shown
    assert "comm/total_uplink_bytes" in shown
