"""The zoo: over a hundred networks of torchvision, timm and transformers, small and with random weights.

    from benchmarks.architectures import ARCHITECTURES
    model, inputs = ARCHITECTURES["torchvision/resnet18"].build()

The inputs are a tensor or a tuple (positional arguments) or a dict (keyword arguments). Nothing is downloaded. Every
network is as its library defines it; where the default would be slow on one core, images, widths or depths are cut
through the library's own options.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Built = tuple[nn.Module, Inputs]

BATCH, CLASSES = 2, 10
WIDTH, FEED_FORWARD, LAYERS, HEADS, KEY_VALUE_HEADS = 64, 96, 2, 4, 2
VOCABULARY, LENGTH = 100, 12


def _make_torchvision_importable() -> torch.library.Library | None:
    """Declare the operators torchvision insists on where its compiled part does not fit the installed torch."""
    found = find_spec("torchvision")
    if found is None or found.origin is None or "torchvision" in sys.modules:
        return None
    with contextlib.suppress(OSError):  # the compiled part loads: it declares everything itself
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # declared before, by whoever imported this file under another name
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_LIBRARY = _make_torchvision_importable()  # kept: the declaration goes when the object does


@dataclass(frozen=True)
class Architecture:
    """A network by name, the library it is from, and how to build it with inputs that fit."""

    name: str
    library: str
    build: Callable[[], Built]


def positional(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs a network takes by position."""
    if isinstance(inputs, dict):
        return ()
    return inputs if isinstance(inputs, tuple) else (inputs,)


def keyword(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs a network takes by name."""
    return inputs if isinstance(inputs, dict) else {}


def _images(size: int) -> Tensor:
    return torch.randn(BATCH, 3, size, size)


def _clips(size: int, frames: int) -> Tensor:
    return torch.randn(BATCH, 3, frames, size, size)


# --------------------------------------------------------------------------------------------------------------------
# torchvision


def _torchvision(name: str, size: int = 64, frames: int = 0, **options: Any) -> Built:
    from torchvision import models

    model = models.get_model(name, weights=None, num_classes=CLASSES, **options)
    return model, _clips(size, frames) if frames else _images(size)


def _torchvision_class(name: str, size: int, **options: Any) -> Built:
    from torchvision import models

    return getattr(models, name)(num_classes=CLASSES, **options), _images(size)


def _mvit(size: int, frames: int) -> Built:
    """Multiscale video transformer of three blocks: the library's function for it fixes the size of the video."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    def block(heads: int, width: int, out: int, stride: int) -> MSBlockConfig:
        return MSBlockConfig(heads, width, out, [3, 3, 3], [3, 3, 3], [1, stride, stride], [1, 2, 2])

    blocks = [block(1, 32, 32, 1), block(2, 32, 64, 2), block(2, 64, 64, 1)]
    options = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    return MViT((size, size), frames, blocks, num_classes=CLASSES, **options), _clips(size, frames)


def _feature_pyramid(name: str, size: int = 64) -> Built:
    from torchvision.models.detection.backbone_utils import mobilenet_backbone, resnet_fpn_backbone

    if name.startswith("mobilenet"):
        return mobilenet_backbone(backbone_name=name, weights=None, fpn=True, trainable_layers=6), _images(size)
    return resnet_fpn_backbone(backbone_name=name, weights=None, trainable_layers=5), _images(size)


def _raft() -> Built:
    from torchvision import models

    return models.optical_flow.raft_small(weights=None), (_images(128), _images(128))


def _dense_prediction(name: str, **options: Any) -> Built:
    return _torchvision(name, weights_backbone=None, **options)


TORCHVISION: dict[str, Callable[[], Built]] = {
    **{
        name: partial(_torchvision, name)
        for name in (
            "vgg11_bn", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "squeezenet1_1",
            "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet0_5", "shufflenet_v2_x0_5",
            "shufflenet_v2_x1_0", "efficientnet_b0", "efficientnet_v2_s", "regnet_y_400mf", "regnet_x_400mf",
            "convnext_tiny", "swin_t", "swin_v2_t",
        )
    },
    "alexnet": partial(_torchvision, "alexnet", 96),
    "googlenet": partial(_torchvision, "googlenet", aux_logits=True, init_weights=False),
    "inception_v3": partial(_torchvision, "inception_v3", 96, aux_logits=True, init_weights=False),
    "vit_b_16": partial(
        _torchvision_class, "VisionTransformer", 64, image_size=64, patch_size=16, num_layers=LAYERS, num_heads=HEADS,
        hidden_dim=WIDTH, mlp_dim=FEED_FORWARD,
    ),
    "maxvit_t": partial(
        _torchvision_class, "MaxVit", 64, input_size=(64, 64), stem_channels=32, partition_size=4,
        block_channels=[32, 64], block_layers=[1, 1], head_dim=16, stochastic_depth_prob=0.1,
    ),
    "fcn_resnet50": partial(_dense_prediction, "fcn_resnet50", aux_loss=True),
    "deeplabv3_resnet50": partial(_dense_prediction, "deeplabv3_resnet50"),
    "deeplabv3_mobilenet_v3_large": partial(_dense_prediction, "deeplabv3_mobilenet_v3_large"),
    "lraspp_mobilenet_v3_large": partial(_dense_prediction, "lraspp_mobilenet_v3_large"),
    "r3d_18": partial(_torchvision, "r3d_18", 32, 4),
    "mc3_18": partial(_torchvision, "mc3_18", 32, 4),
    "r2plus1d_18": partial(_torchvision, "r2plus1d_18", 32, 4),
    "s3d": partial(_torchvision, "s3d", 224, 16),
    "swin3d_t": partial(_torchvision, "swin3d_t", 64, 4),
    "mvit_v2": partial(_mvit, 32, 4),
    "resnet50_fpn": partial(_feature_pyramid, "resnet50"),
    "mobilenet_v3_large_fpn": partial(_feature_pyramid, "mobilenet_v3_large"),
    "raft_small": _raft,
}  # fmt: skip

# --------------------------------------------------------------------------------------------------------------------
# timm


def _timm(name: str, size: int, options: dict[str, Any]) -> Built:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options), _images(size)


_SMALL_VIT = {"img_size": 64, "depth": 2}

TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet50d": (64, {}),
    "res2net50_26w_4s": (64, {}),
    "cspresnet50": (64, {}),
    "cspdarknet53": (64, {}),
    "darknet53": (64, {}),
    "dla34": (64, {}),
    "hrnet_w18_small": (64, {}),
    "seresnet50": (64, {}),
    "skresnet18": (64, {}),
    "ecaresnet26t": (64, {}),
    "resnest14d": (64, {}),
    "gcresnet33ts": (64, {}),
    "botnet26t_256": (64, {"img_size": 64}),
    "halonet26t": (256, {}),
    "lambda_resnet26t": (64, {"img_size": 64}),
    "densenet121": (64, {"block_config": (2, 2, 2, 2)}),
    "dpn48b": (64, {}),
    "ese_vovnet19b_dw": (64, {}),
    "selecsls42": (64, {}),
    "repvgg_a0": (64, {}),
    "regnetz_b16": (64, {}),
    "regnety_002": (64, {}),
    "nfnet_l0": (64, {}),
    "resnetv2_50": (64, {}),
    "resnetv2_50x1_bit": (64, {}),
    "convnext_atto": (64, {}),
    "convnextv2_atto": (64, {}),
    "convmixer_768_32": (64, {}),
    "mobilenetv4_conv_small": (64, {}),
    "mobilenetv4_hybrid_medium": (64, {}),
    "mobilenetv5_base": (64, {}),
    "efficientnet_lite0": (64, {}),
    "tf_efficientnetv2_b0": (64, {}),
    "ghostnet_100": (64, {}),
    "ghostnetv2_100": (64, {}),
    "mobileone_s0": (64, {}),
    "fastvit_t8": (64, {}),
    "repvit_m0_9": (64, {}),
    "starnet_s1": (64, {}),
    "rdnet_tiny": (64, {}),
    "mambaout_femto": (64, {}),
    "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "efficientformer_l1": (224, {}),
    "efficientformerv2_s0": (224, {}),
    "efficientvit_b0": (64, {}),
    "efficientvit_m0": (224, {}),
    "shvit_s1": (64, {}),
    "swiftformer_xs": (64, {}),
    "poolformer_s12": (64, {}),
    "caformer_s18": (64, {}),
    "convformer_s18": (64, {}),
    "vit_tiny_patch16_224": (64, _SMALL_VIT),
    "deit_tiny_patch16_224": (64, _SMALL_VIT),
    "deit_tiny_distilled_patch16_224": (64, _SMALL_VIT),
    "deit3_small_patch16_224": (64, _SMALL_VIT),
    "beit_base_patch16_224": (64, _SMALL_VIT | {"embed_dim": 96, "num_heads": 4}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 2}),
    "vit_relpos_small_patch16_224": (64, _SMALL_VIT),
    "vit_small_patch16_rope_224": (64, _SMALL_VIT),
    "vit_small_r26_s32_224": (64, _SMALL_VIT),
    "samvit_base_patch16_224": (64, _SMALL_VIT | {"embed_dim": 96, "num_heads": 4, "global_attn_indexes": (1,)}),
    "cait_xxs24_224": (64, _SMALL_VIT),
    "xcit_nano_12_p16_224": (64, _SMALL_VIT),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "window_size": 7, "depths": (2, 2, 2)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "depths": (2, 2, 2)}),
    "swinv2_cr_tiny_224": (224, {"depths": (1, 1, 1, 1)}),
    "maxvit_pico_rw_256": (64, {"img_size": 64}),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "coat_lite_tiny": (64, {"img_size": 64}),
    "convit_tiny": (64, _SMALL_VIT),
    "crossvit_tiny_240": (240, {"depth": ((1, 2, 0), (1, 2, 0))}),
    "pvt_v2_b0": (64, {}),
    "twins_svt_small": (64, {"img_size": 64, "depths": (1, 1, 2, 1)}),
    "visformer_tiny": (64, {"img_size": 64}),
    "tnt_s_patch16_224": (64, _SMALL_VIT),
    "mixer_s32_224": (64, {"img_size": 64}),
    "resmlp_12_224": (64, {"img_size": 64}),
    "gmlp_ti16_224": (64, {"img_size": 64}),
    "levit_128s": (224, {}),
    "nest_tiny": (64, {"img_size": 64}),
    "pit_ti_224": (64, {"img_size": 64}),
    "volo_d1_224": (64, {"img_size": 64}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1)}),
    "gcvit_xxtiny": (224, {}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "inception_v4": (96, {}),
    "inception_next_atto": (64, {}),
    "inception_resnet_v2": (96, {}),
    "xception41": (64, {}),
    "hiera_tiny_224": (224, {"stages": (1, 1, 1, 1)}),
    "naflexvit_base_patch16_gap": (64, {"depth": 2, "embed_dim": 96, "num_heads": 4}),
    "sequencer2d_s": (64, {"img_size": 64, "layers": (1, 1, 1, 1)}),
    "focalnet_tiny_srf": (64, {}),
    "nextvit_small": (64, {}),
    "tiny_vit_5m_224": (224, {}),
    "hgnetv2_b0": (64, {}),
    "tresnet_m": (64, {}),
}

# --------------------------------------------------------------------------------------------------------------------
# transformers

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 64, "num_labels": CLASSES, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DECODER = _BASE | {"use_cache": False}
_GROUPED_QUERY = _DECODER | {"num_key_value_heads": KEY_VALUE_HEADS, "head_dim": WIDTH // HEADS}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GPT = {
    "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
    "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": FEED_FORWARD,
    "decoder_ffn_dim": FEED_FORWARD, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": FEED_FORWARD, "num_layers": LAYERS,
    "num_decoder_layers": LAYERS, "num_heads": HEADS, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
_PATCHES = {
    "image_size": 64, "patch_size": 16, "hidden_size": WIDTH, "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_labels": CLASSES,
}  # fmt: skip
_STAGES = {"image_size": 64, "num_labels": CLASSES}
_SPEECH = {
    "hidden_size": WIDTH, "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS, "vocab_size": 32,
    "num_attention_heads": HEADS, "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_labels": CLASSES,
    "classifier_proj_size": 32, "pad_token_id": 0,
}  # fmt: skip


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _text() -> Inputs:
    return {"input_ids": _tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


def _tokens_only() -> Inputs:
    return {"input_ids": _tokens()}


def _text_pair() -> Inputs:
    return {"input_ids": _tokens(), "decoder_input_ids": _tokens(6)}


def _pixels(size: int = 64) -> Inputs:
    return {"pixel_values": _images(size)}


def _text_and_pixels() -> Inputs:
    return {"input_ids": _tokens(), "pixel_values": _images(64)}


def _waveform() -> Inputs:
    return {"input_values": torch.randn(BATCH, 2000)}


def _spectrogram() -> Inputs:
    return {"input_features": torch.randn(BATCH, 16, 40), "decoder_input_ids": _tokens(6)}


def _masked_pixels() -> Inputs:
    return {"pixel_values": _images(64), "pixel_mask": torch.ones(BATCH, 64, 64, dtype=torch.long)}


def _transformers(family: str, head: str, inputs: Callable[[], Inputs], options: dict[str, Any]) -> Built:
    """``FamilyConfig`` and ``FamilyForHead``; options that name a sub-configuration ("text_config") are dicts."""
    transformers = import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, head)(config), inputs()


def _text_models() -> Iterator[tuple[str, str, str, Callable[[], Inputs], dict[str, Any]]]:
    classify = "ForSequenceClassification"
    for name, family, extra in (
        ("bert", "Bert", {}),
        ("roberta", "Roberta", {}),
        ("xlm_roberta", "XLMRoberta", {}),
        ("camembert", "Camembert", {}),
        ("albert", "Albert", {"embedding_size": 32}),
        ("electra", "Electra", {"embedding_size": 32}),
        ("deberta", "Deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
        ("deberta_v2", "DebertaV2", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
        ("mobilebert", "MobileBert", {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}),
        ("convbert", "ConvBert", {"embedding_size": 32}),
        ("squeezebert", "SqueezeBert", {"embedding_size": WIDTH}),
        ("mpnet", "MPNet", {}),
        ("roformer", "RoFormer", {"embedding_size": 32}),
        ("megatron_bert", "MegatronBert", {}),
        ("ernie", "Ernie", {}),
        ("modernbert", "ModernBert", {"cls_token_id": 1, "sep_token_id": 2}),
    ):
        yield name, family, family + classify, _text, _BASE | extra
    distil = {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": FEED_FORWARD, "n_layers": LAYERS, "n_heads": HEADS}
    yield "distilbert", "DistilBert", "DistilBert" + classify, _text, distil | {"num_labels": CLASSES}
    fnet = {k: v for k, v in _BASE.items() if k != "num_attention_heads"}
    yield "fnet", "FNet", "FNet" + classify, _tokens_only, fnet


def _causal_models() -> Iterator[tuple[str, str, str, Callable[[], Inputs], dict[str, Any]]]:
    causal = "ForCausalLM"
    for name, family, options in (
        ("gpt_neox", "GPTNeoX", _DECODER),
        ("codegen", "CodeGen", _GPT | {"rotary_dim": 8, "n_ctx": 64}),
        ("gptj", "GPTJ", _GPT | {"rotary_dim": 8}),
        ("gpt_bigcode", "GPTBigCode", _GPT),
        ("gpt_neo", "GPTNeo", {
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]], "window_size": 8, "max_position_embeddings": 64,
            "intermediate_size": FEED_FORWARD, "use_cache": False,
        }),
        ("opt", "OPT", _DECODER | {"ffn_dim": FEED_FORWARD, "word_embed_proj_dim": WIDTH}),
        ("bloom", "Bloom", _DECODER | {"n_layer": LAYERS, "n_head": HEADS}),
        ("llama", "Llama", _GROUPED_QUERY),
        ("mistral", "Mistral", _GROUPED_QUERY),
        ("mixtral", "Mixtral", _GROUPED_QUERY | {"num_local_experts": 4}),
        ("qwen2", "Qwen2", _GROUPED_QUERY),
        ("qwen2_moe", "Qwen2Moe", _GROUPED_QUERY | _EXPERTS | {"shared_expert_intermediate_size": 48}),
        ("qwen3", "Qwen3", _GROUPED_QUERY),
        ("qwen3_moe", "Qwen3Moe", _GROUPED_QUERY | _EXPERTS),
        ("gemma", "Gemma", _GROUPED_QUERY),
        ("gemma2", "Gemma2", _GROUPED_QUERY),
        ("phi", "Phi", _DECODER),
        ("phi3", "Phi3", _GROUPED_QUERY),
        ("falcon", "Falcon", _DECODER),
        ("mpt", "Mpt", {
            "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "vocab_size": VOCABULARY, "max_seq_len": 64,
            "use_cache": False,
        }),
        ("stablelm", "StableLm", _GROUPED_QUERY),
        ("olmo", "Olmo", _GROUPED_QUERY),
        ("olmo2", "Olmo2", _GROUPED_QUERY),
        ("olmoe", "Olmoe", _GROUPED_QUERY | {"num_experts": 4, "num_experts_per_tok": 2}),
        ("cohere", "Cohere", _GROUPED_QUERY),
        ("starcoder2", "Starcoder2", _GROUPED_QUERY),
        ("granite", "Granite", _GROUPED_QUERY),
        ("smollm3", "SmolLM3", _GROUPED_QUERY),
        ("glm", "Glm", _GROUPED_QUERY),
        ("nemotron", "Nemotron", _GROUPED_QUERY),
        ("deepseek_v3", "DeepseekV3", _DECODER | {
            "num_key_value_heads": HEADS, "moe_intermediate_size": 48, "n_routed_experts": 4, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
            "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        }),
        ("mamba", "Mamba", {
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 8, "num_hidden_layers": LAYERS,
            "use_cache": False,
        }),
        ("rwkv", "Rwkv", {
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "attention_hidden_size": WIDTH, "context_length": 64,
            "num_hidden_layers": LAYERS, "use_cache": False,
        }),
    ):  # fmt: skip
        yield name, family, family + causal, _tokens_only, options
    yield "gemma3_text", "Gemma3Text", "Gemma3ForCausalLM", _tokens_only, _GROUPED_QUERY
    yield "gpt2", "GPT2", "GPT2LMHeadModel", _tokens_only, _GPT


def _sequence_to_sequence_models() -> Iterator[tuple[str, str, str, Callable[[], Inputs], dict[str, Any]]]:
    for name, family, head, options in (
        ("t5", "T5", "T5ForConditionalGeneration", _T5),
        ("mt5", "MT5", "MT5ForConditionalGeneration", _T5 | {"feed_forward_proj": "gated-gelu"}),
        ("bart", "Bart", "BartForConditionalGeneration", _SEQ2SEQ),
        ("mbart", "MBart", "MBartForConditionalGeneration", _SEQ2SEQ),
        ("pegasus", "Pegasus", "PegasusForConditionalGeneration", _SEQ2SEQ),
        ("marian", "Marian", "MarianMTModel", _SEQ2SEQ),
        ("blenderbot", "Blenderbot", "BlenderbotForConditionalGeneration", _SEQ2SEQ),
        ("m2m_100", "M2M100", "M2M100ForConditionalGeneration", _SEQ2SEQ),
    ):
        yield name, family, head, _text_pair, options


def _other_models() -> Iterator[tuple[str, str, str, Callable[[], Inputs], dict[str, Any]]]:
    images = "ForImageClassification"
    pyramid = {"depths": [1, 1, 1, 1], "num_labels": CLASSES}
    for name, family, options in (
        ("vit", "ViT", _PATCHES),
        ("deit", "DeiT", _PATCHES),
        ("beit", "Beit", _PATCHES | {"layer_scale_init_value": 0.1, "use_relative_position_bias": True}),
        ("dinov2", "Dinov2", _PATCHES | {"mlp_ratio": 2}),
        ("swin", "Swin", _STAGES | {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
        ("segformer", "Segformer", _STAGES | {
            "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64], "num_attention_heads": [1, 2, 2, 4],
        }),
        ("convnext", "ConvNext", pyramid | {"hidden_sizes": [16, 32, 48, 64]}),
        ("resnet", "ResNet", pyramid | {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128]}),
        ("regnet", "RegNet", pyramid | {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], "groups_width": 16}),
        # its batch norms, too, start out at a deviation of initializer_range: 0.02 would leave no signal
        ("mobilevit", "MobileViT", _STAGES | {"initializer_range": 0.5}),
        ("mobilenet_v2", "MobileNetV2", _STAGES),
        ("poolformer", "PoolFormer", pyramid | {"hidden_sizes": [16, 32, 48, 64]}),
        ("pvt", "Pvt", _STAGES | {
            "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64], "num_attention_heads": [1, 2, 2, 4],
        }),
        ("cvt", "Cvt", {
            "embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "num_labels": CLASSES,
        }),
        ("levit", "Levit", {
            "image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1],
            "key_dim": [8, 8, 8], "num_labels": CLASSES,
        }),
        ("focalnet", "FocalNet", _STAGES | {
            "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        }),
    ):  # fmt: skip
        yield name, family, family + images, _pixels, options

    text = {k: v for k, v in _BASE.items() if k != "num_labels"}
    vision = {k: v for k, v in _PATCHES.items() if k != "num_labels"}
    towers = {"text_config": text, "vision_config": vision, "projection_dim": 32}
    yield "clip", "CLIP", "CLIPModel", _text_and_pixels, towers
    yield "siglip", "Siglip", "SiglipModel", _text_and_pixels, {k: towers[k] for k in ("text_config", "vision_config")}
    yield "wav2vec2", "Wav2Vec2", "Wav2Vec2ForCTC", _waveform, _SPEECH
    yield "hubert", "Hubert", "HubertForCTC", _waveform, _SPEECH
    whisper = _SEQ2SEQ | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
    yield "whisper", "Whisper", "WhisperForConditionalGeneration", _spectrogram, whisper
    yield "yolos", "Yolos", "YolosForObjectDetection", _pixels, _PATCHES | {
        "image_size": [64, 64], "num_detection_tokens": 5, "use_mid_position_embeddings": False,
    }  # fmt: skip
    stages = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
    yield "detr", "Detr", "DetrForObjectDetection", _masked_pixels, _SEQ2SEQ | {
        "backbone_config": stages | {"out_features": ["stage4"]}, "num_queries": 5, "num_labels": CLASSES,
    }  # fmt: skip


def _entries() -> Iterator[Architecture]:
    for name, build in TORCHVISION.items():
        yield Architecture(name, "torchvision", build)
    for name, (size, options) in TIMM.items():
        yield Architecture(name, "timm", partial(_timm, name, size, options))
    for models in (_text_models, _causal_models, _sequence_to_sequence_models, _other_models):
        for name, family, head, inputs, options in models():
            yield Architecture(name, "transformers", partial(_transformers, family, head, inputs, options))


def _prepared(build: Callable[[], Built]) -> Built:
    """The same weights and inputs every time, without disturbing the caller's random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = build()
    return model.eval(), inputs


ARCHITECTURES: dict[str, Architecture] = {
    f"{entry.library}/{entry.name}": Architecture(entry.name, entry.library, partial(_prepared, entry.build))
    for entry in _entries()
}
