"""Names of TRL that are not here, and what to use instead. Imports nothing."""

from collections.abc import Mapping

ALGORITHM = "a configuration of `mlx_parallm train` has it (docs/algorithms.md)"
ROWS = "a configuration of `mlx_parallm train` has it (docs/your_data.md#training-on-data)"
SETTINGS = "pass the path to the trainer, and a LoraConfig as peft_config"
DATA = "the trainers read rows of text and of messages as they are (docs/trl.md)"
CALLBACK = "write one with the methods of docs/trl.md"

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("RLOOTrainer", "RLOOConfig"),
        f'`algorithm = "rloo"`: {ALGORITHM}; in a script'
        ' GRPOConfig(overrides={"rl_training.advantage": "rloo"})',
    ),
    **dict.fromkeys(("PPOTrainer", "PPOConfig"), f'`algorithm = "ppo"`: {ALGORITHM}'),
    **dict.fromkeys(
        ("OnlineDPOTrainer", "OnlineDPOConfig"), f'`algorithm = "online_dpo"`: {ALGORITHM}'
    ),
    **dict.fromkeys(("ORPOTrainer", "ORPOConfig"), f'`algorithm = "orpo"`: {ROWS}'),
    **dict.fromkeys(
        ("CPOTrainer", "CPOConfig"),
        f'`algorithm = "cpo"`, or "simpo" for loss_type="simpo": {ROWS}',
    ),
    **dict.fromkeys(
        ("BCOTrainer", "BCOConfig"), 'DPOTrainer with DPOConfig(loss_type="bco_pair") has its loss'
    ),
    **dict.fromkeys(
        ("NashMDTrainer", "NashMDConfig", "XPOTrainer", "XPOConfig"),
        f'`algorithm = "online_dpo"` is nearest: {ALGORITHM}',
    ),
    **dict.fromkeys(
        ("MiniLLMTrainer", "MiniLLMConfig"),
        "DistillationTrainer and GKDTrainer learn from a teacher",
    ),
    **dict.fromkeys(
        ("GOLDTrainer", "GOLDConfig"),
        'a teacher with `tokenizer = "own"` has its losses, of a run from the command line'
        " (docs/distillation.md#teachers-of-another-family)",
    ),
    **dict.fromkeys(
        ("PRMTrainer", "PRMConfig"), "RewardTrainer trains a reward model of whole answers"
    ),
    "ModelConfig": SETTINGS,
    "get_peft_config": SETTINGS,
    "get_quantization_config": "a 4-bit base is peft_config=LoraConfig(quantize_base=True)",
    **dict.fromkeys(
        ("ScriptArguments", "TrlParser", "DatasetMixtureConfig", "get_dataset"),
        "a run from the command line is `mlx_parallm train --config FILE.toml` (docs/config.md);"
        " in a script pass the values to the trainer",
    ),
    **dict.fromkeys(
        (
            "apply_chat_template",
            "maybe_apply_chat_template",
            "extract_prompt",
            "maybe_extract_prompt",
            "is_conversational",
            "is_conversational_from_value",
            "maybe_convert_to_chatml",
            "prepare_multimodal_messages",
        ),
        DATA,
    ),
    **dict.fromkeys(
        ("unpair_preference_dataset", "maybe_unpair_preference_dataset"),
        "KTOTrainer reads pairs as two rows each",
    ),
    "pack_dataset": "short rows share a computation already, without seeing each other",
    **dict.fromkeys(
        (
            "clone_chat_template",
            "get_training_chat_template",
            "add_response_schema",
            "supports_tool_calling",
        ),
        "chat_template_path names a file with a template; calls are read in the model's format",
    ),
    "create_reference_model": "the reference is the model as it was before training",
    **dict.fromkeys(
        ("SyncRefModelCallback", "BEMACallback"),
        "sync_ref_model=True in the arguments moves the reference",
    ),
    "LogCompletionsCallback": "log_completions=True, and output_dir/samples.html",
    "RichProgressCallback": "a terminal shows the live display",
    "WeaveCallback": CALLBACK,
    "init_zero_verbose": "nothing here reads it: leave it out",
}
"""name → what to use instead."""
