"""Qwen3-Omni's towers: those of `transformers`, with attention made for many frames and windows of sound at once.

The audio encoder cuts a sound into chunks of a second (100 frames of log-mel features), which pass three convolutions of stride 2
each on its own, and windows of several chunks, inside which its attention stays. `transformers` pads all chunks of a call to the
longest of them, and convolutions see that: what is padded is no zero any more behind the first bias. A row alone is the measure here
too, so a chunk counts as wide as the longest one of its row, whatever it is computed beside.

Legend: A sounds, U windows, C chunks, F frames, M mel bins, W frames of the widest chunk, E features, H values of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder, Qwen3OmniMoeVisionEncoder

from swiftcp.data.batch import AudioItems
from swiftcp.errors import ConfigError
from swiftcp.models.qwen3_vl.tower import VisionTower
from swiftcp.models.tower_layers import FrameAttention, FrameLayout, frame_attention, fused_frame_attention
from swiftcp.models.towers import Unit, layer_multiplications

_NUM_CONVOLUTIONS = 3
_CHUNK_FEATURES = 13
"""What the encoder makes of a whole chunk."""


class Qwen3OmniVisionTower(VisionTower, Qwen3OmniMoeVisionEncoder):
    """See `swiftcp.models.towers.Tower`. `transformers` names its deepstack mergers `merger_list` in this family."""

    @property
    def deepstack_merger_list(self) -> Any:
        return self.merger_list


def convolved(length: int, times: int = _NUM_CONVOLUTIONS) -> int:
    """What convolutions of stride 2, width 3 and padding 1 leave of a length."""
    for _ in range(times):
        length = (length - 1) // 2 + 1
    return length


@dataclass(frozen=True)
class AudioGeometry:
    """See `swiftcp.models.towers.TowerGeometry`. A unit is a window: (its frames, how many its last chunk counts as)."""

    num_mel_bins: int
    chunk_frames: int
    window_chunks: int
    """Chunks of a window of attention."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_channels: int
    """Of the convolutions."""

    @property
    def num_values(self) -> int:
        return self.num_mel_bins

    def units(self, items: AudioItems) -> Tensor:
        """[U, 2]; a sound's windows follow each other."""
        window = self.chunk_frames * self.window_chunks
        units = [
            [min(window, frames - start), min(longest, self.chunk_frames)]
            for frames, longest in zip(items.num_frames_A.tolist(), items.longest_A.tolist(), strict=True)
            for start in range(0, frames, window)
        ]
        return torch.tensor(units, dtype=torch.int64).view(-1, 2)

    def inputs(self, items: AudioItems) -> Tensor:
        return items.features_FM

    def num_rows(self, unit: Unit) -> int:
        return unit[0]

    def num_features(self, unit: Unit) -> int:
        return sum(map(convolved, self._chunks(unit[0])))

    def multiplications(self, unit: Unit) -> int:
        num_features = self.num_features(unit)
        mels = [convolved(self.num_mel_bins, times) for times in (1, 2, 3)]
        channels = (1, self.num_channels, self.num_channels)
        # A kernel of 3 x 3 for each output, and the projection of the last one's columns.
        outputs = [mel * num_features * 2 ** (3 - times) for times, mel in enumerate(mels, start=1)]
        front = sum(9 * values * source * self.num_channels for values, source in zip(outputs, channels, strict=True))
        front += num_features * mels[-1] * self.num_channels * self.hidden_size
        return front + self.num_layers * layer_multiplications(num_features, self.hidden_size, self.intermediate_size)

    def prepare(self, units: Tensor) -> dict[str, Any]:
        """Where each chunk's frames and features lie: indices into the windows' frames, one row of zeros behind them."""
        windows = units.tolist()
        chunks = [(frames, width) for total, width in windows for frames in self._chunks(total)]
        widest = max(width for _, width in chunks)
        ends = torch.tensor([frames for frames, _ in chunks]).cumsum(0)
        column_W = torch.arange(widest)
        inside_CW = column_W < torch.tensor([[frames] for frames, _ in chunks])
        frame_rows_CW = torch.where(inside_CW, ends[:, None] - torch.tensor([[frames] for frames, _ in chunks]) + column_W, ends[-1])
        narrow = any(width < widest for _, width in chunks)
        return {
            "frame_rows_CW": frame_rows_CW,
            "feature_rows_E": _within([convolved(frames) for frames, _ in chunks], convolved(widest)).flatten().nonzero().flatten(),
            "windows": FrameLayout.of([self.num_features(window) for window in windows]),
            # Behind the first two convolutions; what follows the third one looks at one feature alone.
            **{
                f"mask{times}_C1T": _within([convolved(width, times) for _, width in chunks], convolved(widest, times)) if narrow else None
                for times in (1, 2)
            },
        }

    def _chunks(self, frames: int) -> list[int]:
        """Frames of each chunk of a window."""
        full, rest = divmod(frames, self.chunk_frames)
        return [self.chunk_frames] * full + [rest] * (rest > 0)


def audio_geometry(audio_config: Any) -> AudioGeometry:
    """Of the encoder that a configuration describes.

    Raises:
        ConfigError: the sizes of chunks are none that the formula of lengths in `transformers` is made for.
    """
    chunk_frames = 2 * audio_config.n_window
    if convolved(chunk_frames) != _CHUNK_FEATURES or audio_config.n_window_infer < chunk_frames:
        raise ConfigError(
            f"config.json: audio_config.n_window {audio_config.n_window} and n_window_infer {audio_config.n_window_infer} do not make"
            f" chunks of {_CHUNK_FEATURES} features, which Qwen3-Omni is built for: use a checkpoint that has them (50 and 800)"
        )
    return AudioGeometry(
        num_mel_bins=audio_config.num_mel_bins,
        chunk_frames=chunk_frames,
        window_chunks=audio_config.n_window_infer // chunk_frames,
        num_layers=audio_config.encoder_layers,
        hidden_size=audio_config.d_model,
        intermediate_size=audio_config.encoder_ffn_dim,
        num_channels=audio_config.downsample_hidden_size,
    )


def _within(lengths: list[int], longest: int) -> Tensor:
    """[C, 1, longest] bool: which places lie inside each length."""
    return torch.arange(longest) < torch.tensor(lengths)[:, None, None]


class _AudioAttention(nn.Module):
    """The encoder's attention, without a loop over windows. Parameters keep their names."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
        self.num_heads, self.head_dim, self.scaling = attention.num_heads, attention.head_dim, attention.scaling
        self.attend: FrameAttention = frame_attention

    def forward(self, hidden_states: Tensor, *, windows: FrameLayout, **_: Any) -> Tensor:
        """[E, hidden] -> [E, hidden]"""
        query, key, value = (
            projection(hidden_states).unflatten(1, (self.num_heads, -1)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(self.attend(query, key, value, windows, self.scaling).flatten(1))


class Qwen3OmniAudioTower(Qwen3OmniMoeAudioEncoder):
    """See `swiftcp.models.towers.Tower`."""

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)
        for layer in self._layers:
            layer.self_attn = _AudioAttention(layer.self_attn)

    @property
    def _layers(self) -> Any:
        return self.layers

    def use_transformer_engine(self) -> None:
        """Take its attention from now on."""
        for layer in self._layers:
            own = layer.self_attn
            own.attend = fused_frame_attention(own.num_heads, own.head_dim, own.scaling)

    @property
    def feature_shape(self) -> tuple[int, int]:
        """(1, H)"""
        return 1, self.config.output_dim

    def parts(self) -> Iterator[nn.Module]:
        """Modules that together have all parameters, in the order of their use."""
        yield from (self.conv2d1, self.conv2d2, self.conv2d3, self.conv_out, *self._layers, self.ln_post, self.proj1, self.proj2)

    def encode(self, features_FM: Tensor, units: Tensor, prepared: dict[str, Any]) -> Tensor:
        """[E, 1, H]"""
        return self(features_FM, **prepared)[:, None]

    def forward(  # type: ignore[override]
        self,
        features_FM: Tensor,
        *,
        frame_rows_CW: Tensor,
        feature_rows_E: Tensor,
        mask1_C1T: Tensor | None,
        mask2_C1T: Tensor | None,
        windows: FrameLayout,
    ) -> Tensor:
        """[E, H]; the arguments are those of `AudioGeometry.prepare`."""
        padded = F.pad(features_FM, (0, 0, 0, 1)).to(self.conv2d1.weight.dtype)
        chunks_CMW = padded[frame_rows_CW].transpose(1, 2)
        masks = [mask if mask is None else mask.split(self.conv_chunksize) for mask in (mask1_C1T, mask2_C1T)]
        # In parts, for the first convolution's output is large.
        parts = [
            self._convolve(part, *(None if mask is None else mask[number] for mask in masks))
            for number, part in enumerate(chunks_CMW.split(self.conv_chunksize))
        ]
        hidden_CTH = self.conv_out(torch.cat(parts).permute(0, 3, 1, 2).flatten(2))
        hidden_CTH = hidden_CTH + self.positional_embedding.positional_embedding[: hidden_CTH.size(1)].to(hidden_CTH.dtype)
        hidden_EH = hidden_CTH.flatten(0, 1).index_select(0, feature_rows_E)
        for layer in self._layers:
            hidden_EH = layer(hidden_EH, cu_seqlens=None, windows=windows)[0]
        return self.proj2(self.act(self.proj1(self.ln_post(hidden_EH))))

    def _convolve(self, chunks_CMW: Tensor, mask1_C1T: Tensor | None, mask2_C1T: Tensor | None) -> Tensor:
        """[C, channels, mel bins / 8, W / 8]"""
        hidden = chunks_CMW[:, None]
        for convolution, mask in ((self.conv2d1, mask1_C1T), (self.conv2d2, mask2_C1T), (self.conv2d3, None)):
            hidden = F.gelu(convolution(hidden))
            if mask is not None:
                hidden = hidden * mask[:, None]
        return hidden
