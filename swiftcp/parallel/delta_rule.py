"""The gated delta rule in plain PyTorch, exact, in chunks; and the choice of FLA's kernels where they can be used.

A head's state is a matrix that maps keys to values. Each token lets it decay, and moves what it holds for the token's key towards the
token's value: S = exp(g) S; S = S + beta k (v - k^T S); the output is q^T S. Yang et al. 2024, https://arxiv.org/abs/2412.06464.

Inside a chunk the updates depend on each other through a triangular system, which is solved at once for all chunks; only the states
between chunks are computed one after the other (section 3.3 there).

Legend: n sequences taken as one batch, L tokens of each, H heads, K values of a key, V of a value, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 64
FLA = "fla"
"""The package of flash-linear-attention."""


def unit_length(values: Tensor, eps: float = 1e-6) -> Tensor:
    """Divided by their Euclidean length over the last dim."""
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + eps)


def gated_delta_rule(
    query_nLHK: Tensor, key_nLHK: Tensor, value_nLHV: Tensor, decay_nLH: Tensor, beta_nLH: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """The outputs of n sequences, each from an empty state. Computed in float32.

    Queries and keys are brought to unit length, and queries scaled by 1 / sqrt(K).

    Args:
        decay_nLH: g, the logarithm of how much of the state is kept, at most 0.
        beta_nLH: how far the state moves towards the value, from 0 to 1.

    Returns:
        [n, L, H, V] in the type of `value_nLHV`.
    """
    length = value_nLHV.size(1)
    # [n, L, H, ...] -> [n, H, N, C, ...]
    query, key, value, decay, beta = (
        _in_chunks(values, chunk_tokens) for values in (query_nLHK, key_nLHK, value_nLHV, decay_nLH[..., None], beta_nLH[..., None])
    )
    query, key = unit_length(query) * query.size(-1) ** -0.5, unit_length(key)
    kept = decay.cumsum(-2)  # since the chunk's beginning
    behind = torch.ones(query.size(-2), query.size(-2), dtype=torch.bool, device=query.device).triu(1)
    between = (kept - kept.transpose(-1, -2)).masked_fill(behind, -torch.inf).exp()  # [..., i, j]: kept of token j at token i
    system = beta * (key @ key.transpose(-1, -2)) * between
    sides = torch.cat([beta * value, beta * kept.exp() * key], dim=-1)
    written, erased = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        [value.size(-1), key.size(-1)], dim=-1
    )
    scores = (query @ key.transpose(-1, -2)) * between
    output = _over_chunks(query * kept.exp(), key * (kept[..., -1:, :] - kept).exp(), kept[..., -1:, :].exp(), written, erased, scores)
    # [n, H, N, C, V] -> [n, L, H, V]
    return output.flatten(2, 3)[:, :, :length].transpose(1, 2).to(value_nLHV.dtype)


def _in_chunks(values_nLHX: Tensor, chunk_tokens: int) -> Tensor:
    """[n, H, N, C, X] float32; the last chunk is filled up with zeros, which change no output before them."""
    padding = -values_nLHX.size(1) % chunk_tokens
    values = F.pad(values_nLHX.transpose(1, 2).float(), (0, 0, 0, padding))
    return values.unflatten(2, (-1, chunk_tokens))


def _over_chunks(query: Tensor, key: Tensor, kept: Tensor, written: Tensor, erased: Tensor, scores: Tensor) -> Tensor:
    """[n, H, N, C, V]: each chunk reads the state that those before it have left, and writes into it.

    Args:
        query: decayed since the chunk's beginning; `key`: until its end.
        kept: [n, H, N, 1, 1] of a state over the whole chunk.
        written, erased: what the chunk would add to an empty state, and what it takes of the state that it finds.
    """
    state = written.new_zeros(*written.shape[:2], key.size(-1), written.size(-1))
    outputs = []
    for chunk in range(written.size(2)):
        values = written[:, :, chunk] - erased[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + scores[:, :, chunk] @ values)
        state = state * kept[:, :, chunk] + key[:, :, chunk].transpose(-1, -2) @ values
    return torch.stack(outputs, dim=2)


def causal_convolution(values_nLC: Tensor, weight_C1W: Tensor) -> Tensor:
    """Each channel's own filter over the last W tokens of its sequence, then SiLU; [n, L, C]."""
    width = weight_C1W.size(-1)
    filtered = F.conv1d(values_nLC.transpose(1, 2), weight_C1W, padding=width - 1, groups=weight_C1W.size(0))
    return F.silu(filtered[..., : values_nLC.size(1)]).transpose(1, 2)


DeltaKernel = Callable[..., tuple[Tensor, Any]]
"""`fla.ops.gated_delta_rule.chunk_gated_delta_rule`."""


def _fla_problem() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if importlib.util.find_spec(FLA) is None:
        return "flash-linear-attention is not installed (pip install flash-linear-attention)"
    try:
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        _try(kernel)
    except Exception as error:  # it refuses versions of Triton whose results are wrong, and compiles when it is first called
        return f"flash-linear-attention cannot be used: {type(error).__name__}: {error}"
    return None


def _try(kernel: DeltaKernel) -> None:
    """Run a few tokens of two sequences forward and backward and compare with the plain rule.

    Raises:
        RuntimeError: outputs or gradients are not those of the plain rule.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, 192, 2, 64)] * 3 + [(1, 192, 2)] * 2
    inputs = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    inputs[3], inputs[4] = -F.softplus(inputs[3].float()), inputs[4].sigmoid()
    ends = torch.tensor([0, 64, 192], dtype=torch.int32, device="cuda")
    with torch.enable_grad():
        leaves = [values.requires_grad_() for values in inputs]
        parts = (gated_delta_rule(*(values[:, start:end] for values in leaves)) for start, end in ((0, 64), (64, 192)))
        expected = torch.cat(list(parts), dim=1)
        output, _ = kernel(*leaves, cu_seqlens=ends, use_qk_l2norm_in_kernel=True)
        found, wanted = (torch.autograd.grad(values.float().square().sum(), leaves) for values in (output, expected))
    for ours, theirs in zip((output, *found), (expected, *wanted), strict=True):
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        if not difference < 0.05:
            raise RuntimeError(f"its results differ from the plain rule by {difference:.2g}")


@cache
def fla_kernel() -> DeltaKernel | None:
    """FLA's kernel for the gated delta rule, or None where it is missing, refuses or is wrong on this machine; says which it is."""
    problem = _fla_problem()
    if problem is None:
        logger.info("gated delta net: flash-linear-attention's kernels")
        kernel: DeltaKernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        return kernel
    logger.info("gated delta net: PyTorch (%s)", problem)
    return None
