"""What the data pipeline hands to the trainer: samples, and micro-batches of the full, uncut stream.

Shape legend: L tokens of a sample, B rows of a micro-batch (1 when packed), S tokens of a row of the micro-batch,
I visual items (an image, or a whole video), P patches, D values of a patch, V merged visual features, A sounds, F frames of their
log-mel features, M mel bins, E features of the audio encoder.
All tensors are on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from swiftcp.data.rows import BadRow

IGNORED_LABEL = -100


@dataclass(frozen=True)
class VisualItems:
    """Images and videos, and where each of their features goes."""

    patches_PD: Tensor
    """float32, as the checkpoint's processor flattens them, items one after the other. [0, 0] on pipeline stages without a tower, where
    no medium is decoded."""
    grid_thw: Tensor
    """[I, 3] int64: frames, rows and columns of patches of each item."""
    positions_V: Tensor
    """int64: for each merged feature, in the order the tower returns them, its index into the flattened [B*S] stream."""

    @property
    def positions(self) -> Tensor:
        return self.positions_V

    def moved(self, offset: int) -> VisualItems:
        """The same items in a stream that begins `offset` tokens earlier."""
        return replace(self, positions_V=self.positions_V + offset)


@dataclass(frozen=True)
class AudioItems:
    """Audio clips and the sound of videos, and where each of their features goes."""

    features_FM: Tensor
    """float32 log-mel frames, as the checkpoint's feature extractor makes them, sounds one after the other."""
    num_frames_A: Tensor
    """int64: frames of each sound."""
    longest_A: Tensor
    """int64: frames of the longest sound of the same sample; it decides how the encoder pads the last frames of a sound."""
    positions_E: Tensor
    """int64: for each feature of the encoder, sound by sound, its index into the flattened [B*S] stream."""

    @property
    def positions(self) -> Tensor:
        return self.positions_E

    def moved(self, offset: int) -> AudioItems:
        """The same items in a stream that begins `offset` tokens earlier."""
        return replace(self, positions_E=self.positions_E + offset)


@dataclass(frozen=True)
class Sample:
    """One encoded row, alone: positions start at 0 and labels are not shifted."""

    row: int
    """0-based index in the data set."""
    input_ids_L: Tensor
    labels_L: Tensor
    """int64, IGNORED_LABEL where not trained, not shifted: labels[i] is input_ids[i] or ignored."""
    weights_L: Tensor
    """float32 weight of each token's loss, aligned with `labels_L`."""
    position_ids_3L: Tensor
    """int64, or float32 in a family that has times between whole positions."""
    visual: VisualItems | None = None
    audio: AudioItems | None = None
    seconds_per_grid_W: Tensor | None = None
    """float32: of each video, between two rows of frames in its grid. The positions hold them already."""
    bad: BadRow | None = None
    """Why its media could not be decoded: it is padding then, of the length that the plan counts on."""

    def __len__(self) -> int:
        return self.input_ids_L.numel()


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the full stream, before anything is cut for context parallelism."""

    input_ids_BS: Tensor
    position_ids_3BS: Tensor
    labels_BS: Tensor
    """int64, already shifted inside each sample: labels[i] is what token i must predict."""
    weights_BS: Tensor
    """float32, shifted like the labels."""
    padding_mask_BS: Tensor
    """bool, True at padding. Never inferred from a token id."""
    cu_seqlens: Tensor | None
    """[n+1] int32, *padded* lengths of a pack's samples; None when the B rows are padded, one sample each."""
    max_seqlen: int
    lengths: tuple[int, ...]
    """True lengths of the samples, in stream order."""
    rows: tuple[int, ...]
    """Data set row of each sample, in stream order; empty for a filler."""
    visual: VisualItems | None = None
    audio: AudioItems | None = None
    mean_labels: float | None = None
    """Labelled tokens of a micro-batch, on average over those of the global batch that hold rows; None: as many as this one has."""

    bad_rows: Mapping[int, BadRow] = field(default_factory=dict)
    """Those of `rows` that could not be decoded, and are padding."""

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return self.padding_mask_BS.numel() - int(self.padding_mask_BS.sum())

    @property
    def num_labels(self) -> int:
        """Tokens with a label and a weight above 0."""
        return int(((self.labels_BS != IGNORED_LABEL) & (self.weights_BS > 0)).sum())

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None


def _shift(values: Tensor, fill: float) -> Tensor:
    """Move each value one position ahead inside one sample; the last position predicts nothing."""
    return torch.cat([values[1:], values.new_full((1,), fill)])


def _merge[Items: (VisualItems, AudioItems)](items: Sequence[Items | None], offsets: Sequence[int]) -> Items | None:
    """The items of all samples, each at its offset into the flattened stream."""
    parts = [own.moved(offset) for own, offset in zip(items, offsets, strict=True) if own is not None]
    if not parts:
        return None
    return type(parts[0])(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(parts[0])})


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _place(samples: Sequence[Sample], shape: tuple[int, int], offsets: Sequence[int], pad_token_id: int) -> dict[str, Any]:
    """Write the samples into padded [B, S] streams, each at its offset into the flattened stream."""
    num_tokens = shape[0] * shape[1]
    input_ids = torch.full((num_tokens,), pad_token_id, dtype=torch.int64)
    labels = torch.full((num_tokens,), IGNORED_LABEL, dtype=torch.int64)
    weights = torch.zeros(num_tokens, dtype=torch.float32)
    padding = torch.ones(num_tokens, dtype=torch.bool)
    positions = torch.zeros(3, num_tokens, dtype=samples[0].position_ids_3L.dtype if samples else torch.int64)
    for sample, offset in zip(samples, offsets, strict=True):
        here = slice(offset, offset + len(sample))
        input_ids[here] = sample.input_ids_L
        labels[here] = _shift(sample.labels_L, IGNORED_LABEL)
        weights[here] = _shift(sample.weights_L, 0.0)
        padding[here] = sample.bad is not None
        positions[:, here] = sample.position_ids_3L
    return dict(
        input_ids_BS=input_ids.view(shape),
        labels_BS=labels.view(shape),
        weights_BS=weights.view(shape),
        padding_mask_BS=padding.view(shape),
        position_ids_3BS=positions.view(3, *shape),
    )


def collate_pack(
    samples: Sequence[Sample], *, pack_align: int, pad_token_id: int, total_length: int | None = None, length_multiple: int = 1
) -> Batch:
    """One packed micro-batch: each sample padded to a multiple of `pack_align`, one after the other.

    The pack's end is padded up to `total_length` tokens, or else to a multiple of `length_multiple`, as one more sequence without labels.
    Without samples the micro-batch is a filler: `total_length` tokens of padding, or the least that divides.

    Raises:
        ValueError: the samples do not fit `total_length`, or it is no multiple of `pack_align`.
    """
    padded = [_round_up(len(s), pack_align) for s in samples]
    offsets = list(itertools.accumulate(padded, initial=0))[:-1]
    total_length = total_length or _round_up(sum(padded) or 1, math.lcm(pack_align, length_multiple))
    rest = total_length - sum(padded)
    if rest < 0 or rest % pack_align:
        raise ValueError(
            f"{len(samples)} samples of {sum(padded)} padded tokens do not fill {total_length} tokens in steps of {pack_align}"
        )
    if rest:
        padded.append(rest)
    cu_seqlens = torch.tensor([0, *padded]).cumsum(0).to(torch.int32)
    return Batch(
        **_place(samples, (1, total_length), offsets, pad_token_id),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(padded),
        lengths=tuple(len(s) for s in samples),
        rows=tuple(s.row for s in samples),
        visual=_merge([sample.visual for sample in samples], offsets),
        audio=_merge([sample.audio for sample in samples], offsets),
        bad_rows={s.row: s.bad for s in samples if s.bad is not None},
    )


def collate_rows(
    samples: Sequence[Sample], *, pack_align: int, pad_token_id: int, num_rows: int | None = None, length_multiple: int = 1
) -> Batch:
    """One padded micro-batch: a row a sample, all padded to the longest, rounded up to multiples of `pack_align` and `length_multiple`.

    `num_rows` adds rows of padding up to that many; without samples all of them, or one, are a filler.
    """
    num_tokens = _round_up(max((len(s) for s in samples), default=1), math.lcm(pack_align, length_multiple))
    num_rows = num_rows or len(samples) or 1
    offsets = [i * num_tokens for i in range(len(samples))]
    return Batch(
        **_place(samples, (num_rows, num_tokens), offsets, pad_token_id),
        cu_seqlens=None,
        max_seqlen=num_tokens,
        lengths=tuple(len(s) for s in samples),
        rows=tuple(s.row for s in samples),
        visual=_merge([sample.visual for sample in samples], offsets),
        audio=_merge([sample.audio for sample in samples], offsets),
        bad_rows={s.row: s.bad for s in samples if s.bad is not None},
    )
