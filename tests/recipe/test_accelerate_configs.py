"""The Accelerate configurations are read as they are meant, by Accelerate's own parser."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    patch_environment,
)
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, StateDictType

from sparse_cache.recipe.options import Options

CONFIGS = Path(__file__).parents[2] / "recipe" / "accelerate"
TYPES = {
    "one_gpu": DistributedType.NO,
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "deepspeed_zero3": DistributedType.DEEPSPEED,
    "multi_node": DistributedType.FSDP,
}
NESTED = ("fsdp_config", "deepspeed_config", "parallelism_config")
OTHERS_MACHINES = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
"""Of the second machine, whose launcher does not look whether the port is free here."""


def arguments_of(name: str, *more: str) -> argparse.Namespace:
    """What `accelerate launch` makes of a configuration."""
    line = ["--config_file", str(CONFIGS / f"{name}.yaml"), *more, "-m", "package"]
    arguments, defaults, from_file = _validate_launch_command(
        launch_command_parser().parse_args(line)
    )
    fields = list(defaults.deepspeed_config) + (["mixed_precision"] if from_file else [])
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    return arguments


def of_launch(variables: dict[str, str]) -> Any:
    """The variables that a launched process would have."""
    return patch_environment(**variables)


@pytest.fixture(autouse=True)
def environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # Plugins write to it.
    monkeypatch.setattr(os, "environ", os.environ.copy())


def unknown_keys(path: Path) -> list[str]:
    """Keys of the nested parts that are no option of `accelerate launch`: it would ignore them."""
    known = {action.dest for action in launch_command_parser()._actions}
    content = yaml.safe_load(path.read_text())
    return [key for part in NESTED for key in content.get(part, {}) if key not in known]


def test_all_are_tested() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_is_of_its_type_and_has_no_unknown_key(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.distributed_type == TYPES[name]
    assert config.mixed_precision == "bf16" and not config.use_cpu
    assert unknown_keys(path) == []
    first, *_ = lines = path.read_text().splitlines()
    assert first.startswith("# ")
    assert any(f"--config_file recipe/accelerate/{name}.yaml" in line for line in lines)


@pytest.mark.parametrize("name", TYPES)
def test_unknown_keys_are_refused(name: str, tmp_path: Path) -> None:
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    path = tmp_path / "config.yaml"
    for part in NESTED:
        if part in content:
            path.write_text(yaml.safe_dump(content | {part: content[part] | {"fsdp_versoin": 2}}))
            assert unknown_keys(path) == ["fsdp_versoin"]
    path.write_text(yaml.safe_dump(content | {"mixed_precison": "bf16"}))
    with pytest.raises(ValueError, match="mixed_precison"):
        load_config_from_file(str(path))


def test_one_gpu() -> None:
    arguments = arguments_of("one_gpu")
    assert arguments.num_processes == 1
    assert not (arguments.multi_gpu or arguments.use_fsdp or arguments.use_deepspeed)
    command, variables = prepare_simple_launcher_cmd_env(arguments)
    assert command[1:] == ["-m", "package"]
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_ddp() -> None:
    arguments = arguments_of("ddp")
    assert arguments.multi_gpu and arguments.num_processes == 8
    variables = prepare_multi_gpu_env(arguments)
    assert arguments.nproc_per_node == "8"
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "ACCELERATE_USE_FSDP" not in variables
    assert arguments_of("ddp", "--num_processes", "2").num_processes == 2


def plugin_of_fsdp(arguments: argparse.Namespace) -> FullyShardedDataParallelPlugin:
    variables = prepare_multi_gpu_env(arguments)
    assert variables["ACCELERATE_USE_FSDP"] == "true"
    with of_launch(variables):
        plugin = FullyShardedDataParallelPlugin()
        plugin.set_mixed_precision(variables["ACCELERATE_MIXED_PRECISION"])
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    assert plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing
    assert type(plugin.cpu_offload) is OffloadPolicy
    policy = plugin.mixed_precision_policy
    assert isinstance(policy, MixedPrecisionPolicy) and policy.param_dtype == torch.bfloat16
    return plugin


def test_fsdp2() -> None:
    arguments = arguments_of("fsdp2")
    assert arguments.use_fsdp and arguments.num_processes == 8
    assert not arguments.use_parallelism_config
    plugin_of_fsdp(arguments)
    assert arguments.nproc_per_node == "8"
    # What the comment recommends for smaller models.
    arguments = arguments_of("fsdp2", "--fsdp_reshard_after_forward", "false")
    with of_launch(prepare_multi_gpu_env(arguments)):
        assert FullyShardedDataParallelPlugin().reshard_after_forward is False


def test_multi_node() -> None:
    arguments = arguments_of("multi_node", *OTHERS_MACHINES)
    plugin_of_fsdp(arguments)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "8", 1)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("static", "10.0.0.1:29500")
    with of_launch(prepare_multi_gpu_env(arguments)):
        parallelism = ParallelismConfig()
    assert parallelism.total_size == arguments.num_processes == 16
    assert (parallelism.dp_replicate_size, parallelism.dp_shard_size) == (2, 8)


def test_deepspeed_zero3() -> None:
    arguments = arguments_of("deepspeed_zero3")
    assert arguments.use_deepspeed and arguments.num_processes == 8
    command, variables = prepare_deepspeed_cmd_env(arguments)
    assert command is None and arguments.nproc_per_node == "8"
    with of_launch(variables):
        plugin = DeepSpeedPlugin()
    assert plugin.zero3_init_flag
    assert plugin.zero_stage == 3 and plugin.deepspeed_config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 1
    # DeepSpeed clips by itself: what the recipe says by default must be what it does.
    assert plugin.deepspeed_config["gradient_clipping"] == Options().max_grad_norm
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"] == {"enabled": True}
