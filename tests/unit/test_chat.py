"""What is trained: each assistant turn's content and end token, whatever the template does around it, and nothing of a user's text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from swiftcp.config.concerns import LossScale
from swiftcp.data.chat import ChatTemplate, Rendered, reserved_tokens
from swiftcp.data.rows import parse_row
from swiftcp.errors import DataError

from .data_fixtures import chat, processor

END = "<|im_end|>"

HEAD = """
{%- macro text(content) -%}
    {%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""
THINKING = (
    HEAD
    + """
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- set content = text(message.content) -%}
    {%- if message.role == 'assistant' -%}
        {%- set thoughts = message.reasoning_content or '' -%}
        {%- if '</think>' in content -%}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
            {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {%- if loop.index0 > last.question and (loop.last or thoughts) -%}
            {{- '<think>\n' + thoughts + '\n</think>\n\n' -}}
        {%- endif -%}
    {%- endif -%}
    {{- content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}GENERATION{%- endif -%}
"""
)
HYBRID = THINKING.replace("GENERATION", "")
ALWAYS_THINKS = THINKING.replace("GENERATION", "{{- '<think>\n' -}}")
STRIPS = (
    HEAD
    + """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' + text(message.content) | trim + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
)
PLAIN_HEADERS = (
    HEAD + "{%- for message in messages -%}{{- '[' + message.role + ']' + text(message.content) + '<|im_end|>' -}}{%- endfor -%}"
)


def with_template(template: str) -> Any:
    changed = copy.copy(processor())
    changed.chat_template = template
    return changed


def sft(raw: dict[str, Any], template: str | None = None, loss_scale: LossScale = "default") -> Rendered:
    chosen = processor() if template is None else with_template(template)
    return ChatTemplate(chosen, loss_scale).sft(parse_row(raw, Path("d.jsonl"), 1))


def pt(raw: dict[str, Any]) -> Rendered:
    return ChatTemplate(processor()).pt(parse_row(raw, Path("d.jsonl"), 1))


def trained(rendered: Rendered) -> list[str]:
    return [rendered.text[span.start : span.end] for span in rendered.spans]


def conversation(*contents: Any) -> dict[str, Any]:
    """User and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]}


def test_every_turn_and_its_end_token() -> None:
    rendered = sft(conversation("u", "first", "v", "second\n"))
    assert trained(rendered) == ["first" + END, "second\n" + END]
    assert rendered.text == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n"
        "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\nsecond\n<|im_end|>\n"
    )


def test_case_17_consecutive_and_empty_turns() -> None:
    messages = [{"role": "user", "content": "u"}] + [{"role": "assistant", "content": content} for content in ("a", "", "b")]
    assert trained(sft({"messages": messages})) == ["a" + END, END, "b" + END]


def test_a_turn_that_begins_the_conversation() -> None:
    assert trained(sft({"messages": [{"role": "assistant", "content": "a"}]})) == ["a" + END]


def test_contents_that_repeat_or_look_like_headers() -> None:
    row = conversation("assistant\na", "assistant\n", "a", "a")
    assert trained(sft(row)) == ["assistant\n" + END, "a" + END]


def test_parts_of_an_assistant() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert trained(sft(conversation("u", parts))) == ["ab" + END]


def test_loss_and_weight() -> None:
    row = conversation("u", "a", "v", "b", "w", "c")
    row["messages"][1]["loss"] = False
    row["messages"][3]["weight"] = 0.5
    rendered = sft(row)
    assert trained(rendered) == ["b" + END, "c" + END]
    assert [span.weight for span in rendered.spans] == [0.5, 1.0]


@pytest.mark.parametrize("system", [None, "", "Be brief."])
def test_case_16_system_variants_equal_the_template(system: str | None) -> None:
    messages = conversation("u", "a")["messages"]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    rendered = sft({"messages": messages})
    assert rendered.text == processor().apply_chat_template(messages)
    assert trained(rendered) == ["a" + END]


TOOL = {"type": "function", "function": {"name": "at", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "at", "arguments": {"time": 7}}\n</tool_call>'


@pytest.mark.parametrize("content", ["", None, "Let me see."])
def test_tool_calls_are_trained(content: str | None) -> None:
    call = {"type": "function", "function": {"name": "at", "arguments": {"time": 7}}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": content, "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "a"},
    ]
    rendered = sft({"messages": messages, "tools": [TOOL]})
    assert rendered.text == processor().apply_chat_template(messages, tools=[TOOL])
    said = content + "\n" if content else ""
    assert trained(rendered) == [said + CALL + "\n" + CALL + END, "a" + END]


def test_case_09_twin_rows_render_alike() -> None:
    def with_arguments(arguments: Any) -> Rendered:
        message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "at", "arguments": arguments}}]}
        return sft({"messages": [{"role": "user", "content": "u"}, message]})

    assert with_arguments({"time": 7}) == with_arguments('{"time":7}')


THOUGHT = "<think>\nhm\n</think>\n\nA"


@pytest.mark.parametrize(
    ("template", "first", "last"),
    [
        (HYBRID, "A" + END, "B" + END),
        (ALWAYS_THINKS, "A" + END, "B" + END),
    ],
)
def test_case_15_history_is_stripped_and_supplied_thoughts_are_not_trained(template: str, first: str, last: str) -> None:
    rendered = sft(conversation("u", THOUGHT, "v", "B"), template)
    assert rendered.text == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nB<|im_end|>\n"
    )
    assert trained(rendered) == [first, last]


@pytest.mark.parametrize("content", [{"content": THOUGHT}, {"content": "A", "reasoning_content": "hm"}])
def test_case_15_own_thoughts_are_trained(content: dict[str, str]) -> None:
    row = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", **content}]}
    assert trained(sft(row, HYBRID)) == [THOUGHT + END]
    assert trained(sft(row, ALWAYS_THINKS)) == [THOUGHT.removeprefix("<think>\n") + END]


def test_case_15_an_empty_block_of_ones_own_is_trained() -> None:
    assert trained(sft(conversation("u", "<think>\n\n</think>\n\nA"), HYBRID)) == ["<think>\n\n</think>\n\nA" + END]


def test_case_15_without_history() -> None:
    assert trained(sft(conversation("u", "A"), HYBRID)) == ["A" + END]


def test_loss_scale() -> None:
    raw = {"messages": [*conversation("u", "first", "v", "second")["messages"], {"role": "assistant", "content": "third"}]}
    assert trained(sft(raw, loss_scale="last_round")) == ["second" + END, "third" + END]
    whole = sft(raw, loss_scale="all")
    assert trained(whole) == [whole.text]
    raw["messages"][1]["loss"], raw["messages"][3]["loss"], raw["messages"][4]["weight"] = True, False, 0.5
    assert trained(sft(raw, loss_scale="last_round")) == ["first" + END, "third" + END]
    pieces = trained(sft(raw, loss_scale="all"))
    assert "".join(pieces) == whole.text.replace("second" + END, "") and pieces[-2:] == ["third" + END, "\n"]


@pytest.mark.parametrize("loss_scale", ["ignore_empty_think", "last_round+ignore_empty_think"])
def test_case_15_empty_thoughts_may_be_left_out_of_the_loss(loss_scale: LossScale) -> None:
    raw = conversation("u", "<think>\n\n</think>\n\nhi")
    assert trained(sft(raw)) == ["<think>\n\n</think>\n\nhi" + END]
    assert trained(sft(raw, loss_scale=loss_scale)) == ["hi" + END]
    raw = conversation("u", "<think>\nhm\n</think>\n\nhi")
    assert trained(sft(raw, loss_scale=loss_scale)) == ["<think>\nhm\n</think>\n\nhi" + END]


def test_templates_that_strip_contents() -> None:
    assert trained(sft(conversation("u", " a \n", "v", "b"), STRIPS)) == ["a" + END, "b" + END]


def test_both_ways_agree_where_both_apply() -> None:
    row = parse_row(conversation("u", "a\nb", "assistant", "<think>"), Path("d.jsonl"), 1)
    template = ChatTemplate(processor())
    text = template.sft(row).text
    assert template._marked_turns(row, text) == template._structural_turns(row, text) is not None


def test_marks_in_the_text_do_no_harm() -> None:
    row = conversation("\ue0000\ue001", "a \ue0000\ue001 b")
    assert trained(sft(row)) == ["a \ue0000\ue001 b" + END]


def test_templates_whose_turns_cannot_be_found() -> None:
    assert trained(sft(conversation("u", "a"), PLAIN_HEADERS)) == ["a" + END]
    rewrites = PLAIN_HEADERS.replace("text(message.content)", "text(message.content) | trim")
    with pytest.raises(DataError, match="cannot be found in its output"):
        sft(conversation("u", " a"), rewrites)
    with pytest.raises(DataError, match="ends assistant turns with no special token"):
        sft(conversation("u", "a"), PLAIN_HEADERS.replace(END, "."))


def test_template_that_refuses_the_row() -> None:
    with pytest.raises(DataError, match="cannot render the conversation: no tools here"):
        sft(chat("u", tools=[TOOL]), "{%- if tools -%}{{- raise_exception('no tools here') -}}{%- endif -%}" + PLAIN_HEADERS)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "t"}, "the row is a text: sft needs messages"),
        (conversation("u", "a", "v"), "ends with the role user: sft needs an assistant message"),
        ({"messages": [{"role": "user", "content": "u", "loss": True}, {"role": "assistant", "content": "a"}]}, "message 1 of role user"),
        (conversation("u<|im_end|>\n<|im_start|>assistant\nhi", "a"), "message 1 holds the special token <|im_end|>"),
        (conversation("u", "<|image_pad|>"), "message 2 holds the special token <|image_pad|>"),
        (conversation("u", "a<|endoftext|>"), "message 2 holds the special token <|endoftext|>"),
        ({**conversation("u", "a"), "tools": [{"name": "<|im_start|>"}]}, "tools holds the special token <|im_start|>"),
    ],
)
def test_case_17_and_special_tokens_are_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        sft(row)
    assert words in str(caught.value)


def test_reserved_tokens_leave_grounding_and_thoughts_alone() -> None:
    reserved = reserved_tokens(processor())
    assert {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"} <= reserved
    assert not {"<|box_start|>", "<|object_ref_start|>", "<think>", "<tool_call>"} & reserved


def test_pt_trains_the_text_and_one_end_token() -> None:
    rendered = pt({"text": "once upon"})
    assert rendered.text == "once upon<|endoftext|>" and trained(rendered) == [rendered.text]


def test_pt_joins_messages_with_nothing_between() -> None:
    row = conversation("one", " two", " three")
    row["messages"][1]["loss"] = False
    rendered = pt(row)
    assert rendered.text == "one two three<|endoftext|>"
    assert trained(rendered) == ["one", " three<|endoftext|>"]


def test_pt_places_media_between_markers_and_never_trains_them() -> None:
    rendered = pt({"text": "a<image>b<video>", "images": ["a.png"], "videos": ["b.mp4"]})
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    assert rendered.text == f"a{image}b{video}<|endoftext|>"
    assert trained(rendered) == ["a", "b", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a<|endoftext|>b"}, "special token <|endoftext|>"),
        ({**conversation("u", "a"), "tools": [TOOL]}, "pt reads contents alone"),
    ],
)
def test_pt_refuses(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        pt(row)
    assert words in str(caught.value)
