"""What people pass to TRL's trainers: PEFT's LoraConfig, `datasets.Dataset`s, a notebook's cell.
The real packages."""

import re
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from mlx_parallm.errors import ConfigError
from tests.trl.test_trainers import MODEL, PAIRS, PROMPTS, QUICK, letters

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"


def trained(directory: Path, **arguments: Any) -> GRPOTrainer:
    args = GRPOConfig(
        str(directory / "run"), **QUICK, max_steps=1, num_generations=4, max_completion_length=4
    )
    return GRPOTrainer(MODEL, letters, args, **{"train_dataset": PROMPTS} | arguments)


def test_the_lora_config_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    given = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, use_rslora=True, task_type="CAUSAL_LM"
    )
    lora = trained(tmp_path, peft_config=given).config.rl_training.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.use_rslora) == (4, 8.0, 0.1, True)
    assert lora.target_modules == ("q_proj", "v_proj")
    linear = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    with trained(tmp_path, peft_config=linear) as trainer:
        trainer.train()
        trainer.save_model(tmp_path / "saved")
    read = peft.LoraConfig.from_pretrained(str(tmp_path / "saved"))
    assert (read.r, read.use_dora, read.base_model_name_or_path) == (4, True, MODEL)
    with pytest.raises(ConfigError, match="modules_to_save"):
        trained(tmp_path, peft_config=peft.LoraConfig(modules_to_save=["lm_head"]))


def test_data_sets_of_the_package(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    rows = datasets.Dataset.from_list(PROMPTS)
    with trained(tmp_path, train_dataset=rows, eval_dataset=rows.select([0, 1])) as trainer:
        trainer.train()
        assert trainer.evaluate()["eval_problems"] == 2
    splits = datasets.Dataset.from_list(PAIRS).train_test_split(0.25, seed=0)
    args = DPOConfig(str(tmp_path / "pairs"), **QUICK, max_steps=1, per_device_train_batch_size=2)
    with DPOTrainer(MODEL, args, train_dataset=splits["train"], eval_dataset=splits["test"]) as dpo:
        assert dpo.train().global_step == 1
    with pytest.raises(ConfigError, match=r"train_dataset\['train'\]"):
        DPOTrainer(MODEL, args, train_dataset=splits)
    with pytest.raises(ConfigError, match="no length"):
        DPOTrainer(MODEL, args, train_dataset=splits["train"].to_iterable_dataset())


@pytest.mark.slow
def test_the_first_example_of_the_page_in_a_notebook(tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    [code, *_] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    cells = [code.replace("Qwen/Qwen3-0.6B", MODEL), "trainer.close()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client.NotebookClient(
        notebook,
        timeout=100,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    shown = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    assert [line for line in range(1, 5) if f"step={line} " in shown] == [1, 2, 3, 4], (
        "a line for each step"
    )
    assert "predicted too little" not in shown, "what the notebook held before is not the run's"
    assert (tmp_path / "reverse-adapter" / "adapter_model.safetensors").is_file()
