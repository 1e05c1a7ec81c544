"""Rows to samples: rendered text with its placeholders expanded, token ids, labels, weights, positions and what media hold.

One path leads to the ids, whether only their number is asked for (`length`, which decodes no images) or the whole sample (`encode`).
A token is trained if every one of its characters is; what the processor puts in the place of a medium never is.

Legend: L tokens of the sample, C characters of its text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor

from swiftcp.config.concerns import LossScale, TruncationStrategy
from swiftcp.data.batch import IGNORED_LABEL, AudioItems, Sample, VisualItems
from swiftcp.data.chat import ChatTemplate, Rendered
from swiftcp.data.grounding import object_writer
from swiftcp.data.media import MediaAccess, MediaError
from swiftcp.data.placeholders import replacements
from swiftcp.data.rows import BadRow, MediaPart, Row, RowError
from swiftcp.data.sounds import Sounds
from swiftcp.data.visuals import MediaLimits, MediaPlan, Visuals, limit_processor
from swiftcp.errors import ConfigError, DataError

Mode = Literal["sft", "pt"]
PositionIds = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""(input_ids_L, image_grid_thw, video_grid_thw, seconds_per_grid_W) -> [3, L], by the model family's rule."""


class RowEncoder:
    """Turns rows into samples for one checkpoint. It can be sent to worker processes if `position_ids` can."""

    def __init__(
        self,
        processor: Any,
        position_ids: PositionIds,
        *,
        mode: Mode = "sft",
        max_length: int | None = None,
        truncation_strategy: TruncationStrategy = "raise",
        loss_scale: LossScale = "default",
        limits: MediaLimits | None = None,
        access: MediaAccess | None = None,
        decode_media: bool = True,
    ) -> None:
        """
        Args:
            processor: the checkpoint's, from `AutoProcessor`; it is not changed.
            max_length: tokens of the longest sample; rows above it are the data set's to treat, by `truncation_strategy`.
            loss_scale: what of a conversation is trained in `sft`.
            decode_media: False gives samples without patches, from the media's headers alone.

        Raises:
            ConfigError: the limits contradict each other, the tokenizer knows no offsets, or `sft` has no chat template.
        """
        if not processor.tokenizer.is_fast:
            raise ConfigError("the checkpoint's tokenizer is a slow one, which cannot tell where tokens lie: add its tokenizer.json")
        if mode == "sft" and not (getattr(processor, "chat_template", None) or processor.tokenizer.chat_template):
            raise ConfigError("the checkpoint has no chat template, which sft needs: add its chat_template.jinja, or train with pt")
        self.mode = mode
        self.max_length = max_length
        self.truncation_strategy = truncation_strategy
        self._processor = limit_processor(processor, limits or MediaLimits())
        self._position_ids = position_ids
        self._decode_media = decode_media
        self._template = ChatTemplate(self._processor, loss_scale)
        self.access = access or MediaAccess()
        self._visuals = Visuals(self._processor, self.access)
        self._sounds = Sounds(self._processor, self.access)
        self._loss_scale = loss_scale

    @property
    def pad_token_id(self) -> int:
        """What fills padding; no mask is ever inferred from it."""
        tokenizer = self._processor.tokenizer
        return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def length(self, row: Row) -> int:
        """Tokens of the row's sample; see `measure`."""
        return self.measure(row)[0]

    def measure(self, row: Row) -> tuple[int, int]:
        """Tokens of the row's sample, and how many of them are predicted in training; from its text and the sizes of its media.

        Raises:
            RowError: the row cannot become a sample.
        """
        with _naming(row):
            rendered = self._render(row)
            input_ids_L, _, weights_L = self._tokens(row, rendered, self._plan(row, self._sounds.lengths(row)))
            return input_ids_L.numel(), int((weights_L[1:] > 0).sum())

    def is_trained(self, row: Row) -> bool:
        """Whether any of the row's text is trained: `loss` and `weight` may leave none.

        Raises:
            RowError: the row cannot become a sample.
        """
        with _naming(row):
            return any(span.end > span.start and span.weight > 0 for span in self._render(row).spans)

    def check_media(self, row: Row, parts: Sequence[MediaPart] | None = None) -> None:
        """Decode these media of the row (all by default) to their last byte, of videos to the last frame that is taken.

        Raises:
            RowError: a file is broken.
        """
        with _naming(row):
            parts = row.media if parts is None else parts
            self._visuals.check(parts, row.file.parent)
            self._sounds.check(parts, row)

    def settings(self) -> bytes:
        """Digest of all but the row that decides its length: code, template, tokenizer, limits."""
        processor, tokenizer = self._processor, self._processor.tokenizer
        parts = [getattr(processor, name, None) for name in ("image_processor", "video_processor", "feature_extractor")]
        texts = [
            *(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))),
            transformers.__version__,
            json.dumps(processor.chat_template or tokenizer.chat_template),
            tokenizer.backend_tokenizer.to_str(),
            str(tokenizer.special_tokens_map),
            *(part.to_json_string() for part in parts if part is not None),
            repr((self.mode, self._loss_scale, self.access)),
            repr((self.truncation_strategy, self.max_length) if self.truncation_strategy in ("left", "right") else ()),
        ]
        return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).digest()

    def encode(self, row: Row, index: int) -> Sample:
        """The sample of the row at `index` of the data set.

        Raises:
            RowError: the row cannot become a sample.
        """
        with _naming(row):
            rendered, clips = self._render(row), self._sounds.read(row) if self._decode_media else []
            plan = self._plan(row, [clip.size for clip in clips] if self._decode_media else self._sounds.lengths(row))
            input_ids_L, labels_L, weights_L = self._tokens(row, rendered, plan)
            return Sample(
                row=index,
                input_ids_L=input_ids_L,
                labels_L=labels_L,
                weights_L=weights_L,
                position_ids_3L=self._position_ids(
                    input_ids_L, _or_none(plan.image_grid_thw), _or_none(plan.video_grid_thw), _or_none(plan.seconds_per_grid_W)
                ),
                visual=self._visual_items(row, plan, input_ids_L) if row.images or row.videos else None,
                audio=self._audio_items(clips, plan, input_ids_L) if row.sounds else None,
                seconds_per_grid_W=_or_none(plan.seconds_per_grid_W),
            )

    def padding(self, length: int, index: int, bad: BadRow) -> Sample:
        """What stands in the place of a sample of `length` tokens whose media cannot be decoded: nothing of it is trained, or seen."""
        input_ids_L = torch.full((length,), self.pad_token_id, dtype=torch.int64)
        return Sample(
            row=index,
            input_ids_L=input_ids_L,
            labels_L=torch.full((length,), IGNORED_LABEL, dtype=torch.int64),
            weights_L=torch.zeros(length),
            position_ids_3L=self._position_ids(input_ids_L, None, None, None),
            bad=bad,
        )

    def _tokens(self, row: Row, rendered: Rendered, plan: MediaPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, labels and weights, [L] each."""
        text, weights_C = self._expand(row, rendered, plan)
        tokens = self._tokenize(text)
        input_ids_L = torch.tensor(tokens["input_ids"], dtype=torch.int64)
        labels_L, weights_L = _label(input_ids_L, np.array(tokens["offset_mapping"]).reshape(-1, 2), weights_C)
        is_media_L = torch.isin(input_ids_L, self._media_token_ids())
        labels_L[is_media_L] = IGNORED_LABEL
        kept = self._kept(is_media_L)
        return input_ids_L[kept], labels_L[kept], torch.where(labels_L == IGNORED_LABEL, 0.0, weights_L)[kept]

    def _kept(self, is_media_L: Tensor) -> slice:
        """The tokens of a row that truncation leaves: all of them where it would cut media, and the row is too long then."""
        if self.max_length is None or len(is_media_L) <= self.max_length or self.truncation_strategy not in ("left", "right"):
            return slice(None)
        left = self.truncation_strategy == "left"
        kept, cut = slice(-self.max_length, None) if left else slice(self.max_length), is_media_L.clone()
        cut[kept] = False
        return slice(None) if cut.any() else kept

    def _plan(self, row: Row, lengths: Sequence[int]) -> MediaPlan:
        """Grids, frames and lengths of all media, given the samples of each sound."""
        return replace(self._visuals.plan(row), num_frames_A=self._sounds.num_frames(lengths))

    def _render(self, row: Row) -> Rendered:
        if row.objects is not None:
            sizes = self._visuals.image_sizes(row) if row.objects.needs_sizes else {}
            row = row.with_texts(object_writer(row.objects, sizes))
        rendered = self._template.sft(row) if self.mode == "sft" else self._template.pt(row)
        for kind, parts in (("image", row.images), ("video", row.videos), ("audio", row.audios)):
            token = getattr(self._processor, f"{kind}_token", None)
            if token is not None and rendered.text.count(token) != len(parts):
                raise DataError(
                    f"the checkpoint's chat template writes {rendered.text.count(token)} of the row's {len(parts)} {kind}s:"
                    " put media into user messages"
                )
        return rendered

    def _expand(self, row: Row, rendered: Rendered, plan: MediaPlan) -> tuple[str, np.ndarray]:
        """The text with its placeholders expanded, and the weight of each of its C characters, -1 where not trained."""
        before_C = np.full(len(rendered.text), -1.0, dtype=np.float32)
        for span in rendered.spans:
            before_C[span.start : span.end] = span.weight
        written = replacements(self._processor, plan, use_audio_in_video=row.use_audio_in_video)
        (text,), (replaced,) = self._processor.get_text_with_replacements([rendered.text], *written)
        after_C = np.full(len(text), -1.0, dtype=np.float32)
        old = new = 0
        for replacement in [*replaced, {"span": (len(before_C),) * 2, "new_span": (len(after_C),) * 2}]:
            after_C[new : replacement["new_span"][0]] = before_C[old : replacement["span"][0]]
            old, new = replacement["span"][1], replacement["new_span"][1]
        return text, after_C

    def _tokenize(self, text: str) -> Any:
        """As `apply_chat_template` does: no second token for the text's beginning. A text for pre-training gets none at all."""
        tokenizer = self._processor.tokenizer
        begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return tokenizer(text, add_special_tokens=self.mode == "sft" and not begun, return_offsets_mapping=True, verbose=False)

    def _media_token_ids(self) -> Tensor:
        """Ids of placeholders and of the markers around them."""
        tokens = [value for name, value in vars(self._processor).items() if name.endswith("_token") and isinstance(value, str)]
        return torch.tensor(self._processor.tokenizer.convert_tokens_to_ids(tokens))

    def _places(self, kind: str, input_ids_L: Tensor) -> Tensor:
        """Where the placeholders of a kind of media stand."""
        token = self._processor.tokenizer.convert_tokens_to_ids(getattr(self._processor, f"{kind}_token"))
        return (input_ids_L == token).nonzero().flatten()

    def _visual_items(self, row: Row, plan: MediaPlan, input_ids_L: Tensor) -> VisualItems:
        """Images first, then videos; each kind in the order of its placeholders."""
        places = [self._places(kind, input_ids_L) for kind in ("image", "video")]
        for positions, grid_thw in zip(places, (plan.image_grid_thw, plan.video_grid_thw), strict=True):
            assert positions.numel() == grid_thw.prod(1).sum() // self._processor.image_processor.merge_size**2
        patches_PD = self._visuals.patches(row, plan) if self._decode_media else torch.empty(0, 0)
        return VisualItems(patches_PD, torch.cat([plan.image_grid_thw, plan.video_grid_thw]), torch.cat(places))

    def _audio_items(self, clips: Sequence[np.ndarray], plan: MediaPlan, input_ids_L: Tensor) -> AudioItems:
        """In the order of the conversation, as their placeholders are."""
        longest_A = plan.num_frames_A.max().expand_as(plan.num_frames_A)
        features_FM = self._sounds.features(clips) if clips else torch.empty(0, 0)
        return AudioItems(features_FM, plan.num_frames_A, longest_A.clone(), self._places("audio", input_ids_L))


@contextmanager
def _naming(row: Row) -> Iterator[None]:
    """Errors about data get the row's file and line; what nobody foresaw gets them as a note."""
    try:
        yield
    except RowError:
        raise
    except DataError as error:
        raise row.error(str(error), "media" if isinstance(error, MediaError) else "row") from None
    except Exception as error:
        error.add_note(f"while reading {row.file}:{row.line}")
        raise


def _label(input_ids_L: Tensor, offsets_L2: np.ndarray, weights_C: np.ndarray) -> tuple[Tensor, Tensor]:
    """Labels and weights [L] of tokens that lie at `offsets_L2` in a text with the weights `weights_C` (-1 where not trained)."""
    starts, ends = offsets_L2.T
    num_trained = np.concatenate([[0], np.cumsum(weights_C >= 0)])
    whole = (ends > starts) & (num_trained[ends] - num_trained[starts] == ends - starts)
    weights = np.where(whole, weights_C[np.minimum(starts, len(weights_C) - 1)], 0.0).astype(np.float32)
    return torch.where(torch.from_numpy(whole), input_ids_L, IGNORED_LABEL), torch.from_numpy(weights)


def _or_none(grid_thw: Tensor) -> Tensor | None:
    return grid_thw if len(grid_thw) else None
