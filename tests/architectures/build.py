"""A tiny random-weight model of every type in transformers' causal-LM mapping.

Each configuration class is constructed with its defaults to learn which attributes it has; those
whose names are in `SMALL` are then shrunk, layer lists are shortened so that every kind of layer
stays present, and `OVERRIDES` corrects the types for which that is not enough. Weights are drawn
again with a scale that keeps activations near one: the default initialisation gives almost flat
attention and logits, which would hide a wrong mask or a wrong position.
"""

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
VOCAB = 120

#: Attribute name -> small value, applied wherever a configuration has the attribute and its
#: default is not None.
SMALL: dict[str, Any] = {
    # width
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim"),
        HIDDEN,
    ),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "embedding_dim"), HIDDEN),
    # depth
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    # heads
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS
    ),
    **dict.fromkeys(
        (
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
            "swa_num_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "dim_head", "d_head"), HEAD_DIM),
    # feed-forward
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "dff",
            "dim_ff",
            "d_inner",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "ffn_hidden_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "prefix_dense_intermediate_size",
            "feed_forward_size",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        32,
    ),
    # vocabulary and special tokens
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"),
        VOCAB,
    ),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "eod_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "decoder_start_token_id": 1,
    # positions
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("model_max_length", "max_target_positions", "context_length"), 512),
    "rotary_dim": 8,
    # sliding windows, small enough to be smaller than the test's sequences
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), 8),
    **dict.fromkeys(("sliding_window_size", "attention_chunk_size", "local_attention"), 8),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "topk_group"), 1
    ),
    **dict.fromkeys(("n_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("zero_expert_num",), 2),
    "num_dense_layers": 1,
    # latent attention: keys and values of different widths on purpose
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # indexers: fewer selected than the longest test sequence
    "index_topk": 12,
    "index_head_dim": 16,
    # many heads: their summed scores pass through a ReLU, and two would leave many exact ties
    "index_n_heads": 16,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    # state-space and linear attention layers
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_chunk_size": 16,
    "mamba_dt_rank": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 8,
    "chunk_size": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "lru_width": HIDDEN,
    # others
    "hidden_size_per_layer_input": 16,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "summary_type": "first",
    "layerdrop": 0.0,
}

#: Attributes that name one entry per layer; rebuilt so that each kind of layer stays present.
PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")

#: Attributes of sub-configurations that are towers of another modality.
TOWERS = ("vision_config", "audio_config", "vq_config", "audio_encoder_config", "audio_encoder")

DROP = object()
"""As an override: leave the attribute to the configuration class."""

SLIDING_FULL = ["sliding_attention", "full_attention"]
CONV_FULL = ["conv", "full_attention"]
GEMMA4_SHARED = {
    "layer_types": SLIDING_FULL * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "global_head_dim": 24,
}
VISION_TINY = {"num_hidden_layers": 1}

#: model type -> attributes set after shrinking. A nested dict changes a sub-configuration.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "local_attention_window_len": 64,
        "encoder_config": {"hidden_size_global": HIDDEN, "cross_attn_k": 2},
        "decoder_config": {"hidden_size_global": HIDDEN, "cross_attn_k": 2},
        "num_hidden_layers": 6,
    },
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "cohere2_moe": {"logit_scale": 0.3},
    "cohere_compass_text": {
        "layer_types": SLIDING_FULL,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in (("full_attention", 5e5), ("sliding_attention", 1e4))
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "dory": {
        "layer_types": SLIDING_FULL * 2,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_layers": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "layer_types": SLIDING_FULL * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "laurel_rank": 16,
    },
    "gemma4": {"text_config": GEMMA4_SHARED},
    "gemma4_text": GEMMA4_SHARED,
    "gemma4_unified": {"text_config": GEMMA4_SHARED},
    "gemma4_unified_text": GEMMA4_SHARED,
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": SLIDING_FULL * 2, "num_hidden_layers": 4},
    "lfm2": {"layer_types": CONV_FULL * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": CONV_FULL * 2, "num_hidden_layers": 4},
    "llama4": {"text_config": {"no_rope_layers": [1, 0, 1, 0]}},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mellum": {
        "layer_types": SLIDING_FULL * 2,
        "mlp_layer_types": ["sparse"] * 4,
        "num_hidden_layers": 4,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "minicpm3": {"dim_model_base": HIDDEN, "scale_emb": 1},
    "ministral": {"head_dim": HEAD_DIM},
    "mpt": {"use_cache": True},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 12,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "reformer": {
        "axial_pos_shape": (16, 32),
        "axial_pos_embds_dim": (16, 48),
        "attention_head_size": HEAD_DIM,
        "attn_layers": ("local", "lsh"),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 50},
    "smollm3": {"no_rope_layers": [1, 0]},
    "xlm": {"causal": True},
    "xlstm": {"chunk_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "tie_word_embeddings": False},
}
OVERRIDES["qwen4_exp"] = {"text_config": OVERRIDES["qwen4_exp_text"]}
OVERRIDES["dots3_note"]["text_config"] = OVERRIDES["dots3_note_text"] = {
    "per_layer_config": {
        index: {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 20,
            "kv_lora_rank": 12,
            "head_dim": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        }
        for index in (1, 3)
    },
    "head_dim": 24,
}


def causal_lm_types() -> list[str]:
    """All model types in transformers' causal-LM mapping, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shorten_layers(kinds: list[str], length: int) -> list[str]:
    """Shorten a list with one kind per layer, keeping every kind that occurs.

    The kinds are kept in order of first appearance and repeated; layer 0 keeps its kind.
    """
    distinct = list(dict.fromkeys(kinds))
    if len(distinct) == 1:
        return distinct * length
    if distinct[0] == "dense" and "sparse" in distinct:
        return ["dense", *["sparse"] * (length - 1)]
    return [distinct[index % len(distinct)] for index in range(length)]


def small_arguments(default: PreTrainedConfig, depth: int | None = None) -> dict[str, Any]:
    """Constructor arguments that shrink a default configuration.

    Args:
        default: a configuration constructed with its defaults.
        depth: number of layers; by default 4 where layers are of several kinds, else 2.
    """
    present = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    arguments: dict[str, Any] = {}
    lists = {
        name: present[name]
        for name in PER_LAYER_LISTS
        if isinstance(present.get(name), (list, tuple)) and present[name]
    }
    if depth is None:
        depth = 4 if any(len(set(kinds)) > 1 for kinds in lists.values()) else 2
    for name, value in present.items():
        if isinstance(value, PreTrainedConfig):
            arguments[name] = {**small_arguments(value), "model_type": value.model_type}
        elif name in lists:
            arguments[name] = shorten_layers(list(value), depth)
        elif name in SMALL and value is not None and not isinstance(value, (list, dict)):
            arguments[name] = SMALL[name]
        elif "dropout" in name and isinstance(value, float):
            arguments[name] = 0.0
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if name in arguments:
            arguments[name] = depth
    if "kv_lora_rank" in present and "num_key_value_heads" in arguments:
        arguments["num_key_value_heads"] = HEADS  # latents are expanded to every head
        arguments.pop("head_dim", None)  # derived from the rotary part
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if name in present:
            arguments[name] = SMALL[name]
    if present.get("tie_word_embeddings") and "gemma" in default.model_type:
        # the embedding is scaled up there: a tied model would mostly repeat its last token
        arguments["tie_word_embeddings"] = False
    if "is_decoder" in present:
        arguments["is_decoder"] = True
    return arguments


def merge(arguments: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply overrides to constructor arguments, entering nested dictionaries."""
    merged = dict(arguments)
    for name, value in changes.items():
        if value is DROP:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = merge(merged[name], value)
        else:
            merged[name] = value
    return merged


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The small configuration of a model type."""
    config_class = CONFIG_MAPPING[model_type]
    changes = OVERRIDES.get(model_type, {})
    try:
        default = config_class()
    except Exception:
        default = config_class(**{k: v for k, v in changes.items() if v is not DROP})
    return config_class(**merge(small_arguments(default), changes))


#: Parameters whose initial values carry structure (decay rates, time steps, gates that start at a
#: chosen point); drawing them again gives unstable recurrences rather than a better test.
KEPT_PARAMETERS = ("A_log", "dt_", ".D", "time_", "lambda", "conv", "recurrent_gate", "rg_lru")


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw a model's weights again so that attention is peaked and logits differ clearly.

    Matrices get a standard deviation of 1.3 / sqrt(fan in), embeddings 1; vectors are moved by a
    tenth so that biases and norms matter as well.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    head = model.get_output_embeddings()
    if head is not None:  # a tied table has the scale of an output matrix
        embeddings.discard(id(getattr(head, "weight", None)))
    for name, parameter in model.named_parameters():
        if any(part in name for part in KEPT_PARAMETERS) or not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if id(parameter) in embeddings:
            parameter.copy_(noise * 0.5)
        elif parameter.ndim >= 2:
            parameter.copy_(noise * 1.3 / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(noise * 0.1)


def build_tiny(
    model_type: str, seed: int = 0, attention: str | None = None
) -> tuple[PreTrainedModel, int, str]:
    """Build a tiny causal LM of a model type, float32 on CPU, in evaluation mode.

    Args:
        model_type: a key of transformers' causal-LM mapping.
        seed: of the weights; the same seed gives the same weights for every `attention`.
        attention: name of the attention implementation, by default what transformers chooses.

    Returns:
        The model, the number of token ids that are safe to use as input (ids below 3 are special),
        and a note about how the model was built (empty when ordinary).

    Raises:
        Exception: whatever the configuration or the model raises; see docs/architectures.md for
            the types that cannot be built and why.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(config, **options).float().eval()
    draw_weights(model, seed)
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = None
    generation.forced_bos_token_id = generation.begin_suppress_tokens = None
    # a generated padding token would change the positions of models that count others than it
    generation.suppress_tokens = [0, 1, 2]
    generation.pad_token_id = 0
    generation.cache_implementation = None
    text = model.config.get_text_config(decoder=True)
    vocabulary = int(getattr(text, "vocab_size", VOCAB))
    notes = []
    if text is not model.config:
        notes.append(f"text part of {type(model.config).__name__}")
    return model, vocabulary, "; ".join(notes)
