"""``nn.MultiheadAttention`` with fewer heads, which its own code cannot run: it takes every width from the input."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MultiheadForward:
    """Stands in for ``forward`` of one instance; head width and scale stay those of the full attention."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self.module = module

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module = self.module
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal needs attn_mask too, as in nn.MultiheadAttention.")
        batched = query.dim() == 3
        q, k, v = (x if batched else x.unsqueeze(0 if module.batch_first else 1) for x in (query, key, value))
        if not module.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._projected(q, k, v)
        mask = _additive(attn_mask, q.dtype)
        padding = _additive(key_padding_mask, q.dtype)
        q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (q, k, v))  # [B, heads, L, width]
        if mask is not None:
            if mask.dim() == 3:
                mask = mask.unflatten(0, (q.shape[0], -1))
                if mask.shape[1] != q.shape[1]:
                    raise ValueError(
                        f"attn_mask has {mask.shape[1]} heads, but {q.shape[1]} are left: give one mask for all heads."
                    )
            else:
                mask = mask[None, None]
        if module.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        extra = k.shape[-2] - key.shape[1 if (module.batch_first and batched) else 0]
        mask, padding = (m if m is None or not extra else F.pad(m, (0, extra)) for m in (mask, padding))
        if padding is not None:
            padding = padding[:, None, None]
            mask = padding if mask is None else mask + padding
        dropout = module.dropout if module.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * module.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = module.out_proj(out.transpose(1, 2).flatten(-2))
        if not module.batch_first:
            out = out.transpose(0, 1)
        return (out if batched else out.squeeze(0 if module.batch_first else 1)), weights

    __code__ = __call__.__code__  # torch.export looks for it on the forward of the model it is given

    def _projected(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self.module
        biases: Any = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        if module._qkv_same_embed_dim:
            weights: Any = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True))
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat((k, module.bias_k.expand(len(k), -1, -1)), dim=1)
            v = torch.cat((v, module.bias_v.expand(len(v), -1, -1)), dim=1)
        return q, k, v


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of truths as numbers to add: -inf where it is true."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
