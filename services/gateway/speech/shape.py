"""What a chat request becomes for one model: template input, grammar, and the reader of its output.

Tools are described by the model's template; one that knows none gets them in the system message. A request that must
call has a grammar of calls; one that may call has one only where a tool is strict, or where its answer has a form of
its own. A model that reasons does so before either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.speech import check, conversation
from services.gateway.speech.check import Function
from services.gateway.speech.grammar import Grammar
from services.gateway.speech.profile import Profile
from services.gateway.speech.reader import MakeReader, Reading, prompt_digest
from services.gateway.tokenizers import ModelTokenizer
from services.gateway.validate import bad

_FORCED = (pb.ToolChoice.MODE_REQUIRED, pb.ToolChoice.MODE_NAMED)
# Schemas in one grammar.
MAX_EXACT_CHARS = 32 * 1024
# Tokens at a prompt's end in which a mark that the template wrote is looked for.
_TAIL_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Speech:
    """How a request is answered. `grammar`: what the output must look like, instead of the request's own; None = as
    that says. `reader`: None = the output is plain text."""

    grammar: pb.Grammar | None = None
    reader: MakeReader | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """`messages`, `tools`, `variables`: what the template is given. `continued`: the last message goes on instead of
    being answered. `functions`: those that may be called. `digest`: of all that shapes prompt and reading beside the
    messages, b"" where nothing does; it does not depend on the model."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    digest: bytes = b""
    profile: Profile = field(default_factory=Profile)
    functions: Sequence[Function] = ()
    forced: bool = False
    parallel: bool = True
    form: pb.Grammar | None = None

    def speech(self, token_ids: Sequence[int], tokenizer: ModelTokenizer) -> Speech:
        """How the prompt is answered that `token_ids` are. Raises InvalidArgument where the form of answer cannot be
        had beside calls."""
        marks = self.profile.reasoning
        opened = marks is not None and self._opened(marks.start, marks.end, token_ids, tokenizer)
        grammar = self._grammar(opened)
        if self.form is not None and grammar is None:
            # It holds from the output's first character: there is no room for reasoning.
            marks, opened = None, False
        if marks is None and not self.functions:
            return Speech(grammar)
        reading = Reading(
            reasoning=marks,
            opened=opened,
            tools=self.profile.tools if self.functions else None,
            names=frozenset(function.name for function in self.functions),
            parallel=self.parallel,
            prompt=prompt_digest(token_ids),
        )
        return Speech(grammar, reading)

    def _opened(self, start: str, end: str, token_ids: Sequence[int], tokenizer: ModelTokenizer) -> bool:
        if self.continued:
            said = str(self.messages[-1]["content"])
            return said.rfind(start) > said.rfind(end)
        tail = b"".join(tokenizer.raw_bytes(token_id) for token_id in token_ids[-_TAIL_TOKENS:])
        return tail.decode("utf-8", "replace").rstrip().endswith(start)

    def _grammar(self, opened: bool) -> pb.Grammar | None:
        strict = {function.name for function in self.functions if function.strict}
        exact = {function.name for function in self.functions} if self.forced else strict
        if sum(len(function.text) for function in self.functions if function.name in exact) > MAX_EXACT_CHARS:
            # That those whose caller does not insist follow their schemas too is a help, not a promise.
            exact = strict
        grammar = Grammar(self.profile)
        answer = grammar.answer(self.form) if self.form is not None else None
        if self.form is not None and answer is None:
            if self.functions:
                raise bad("grammar", "a lark grammar cannot go with tools")
            return None
        if self.forced:
            if self.form is not None:
                raise bad("grammar", "cannot go with a tool_choice that must call")
            start = grammar.calls(self.functions, many=self.parallel, exact=exact)
        elif self.functions and answer is not None:
            calls = grammar.calls(self.functions, many=self.parallel, exact=exact, marked=True)
            start = f"{calls} | {answer}"
        elif strict:
            start = grammar.free(self.functions, many=self.parallel, exact=exact)
        elif answer is not None and self.profile.reasoning is not None:
            start = answer
        else:
            return None
        if self.profile.reasoning is not None:
            start = f"{grammar.thought(self.profile.reasoning, opened=opened)} ({start})"
        return grammar.build(start)


def shape(request: pb.ChatRequest, tokenizer: ModelTokenizer) -> Shape:
    """Raises InvalidArgument by field."""
    profile = tokenizer.profile
    functions = check.check_tools(request.tools)
    callable_ = check.check_choice(request.tool_choice, functions)
    variables = check.check_variables(request.template_variables)
    calls = check.check_calls(request.messages)
    last = request.messages[-1]
    if request.continue_final_message and (last.role != "assistant" or last.tool_calls):
        raise bad("continue_final_message", "the last message must be an assistant's, without tool calls")
    forced = request.tool_choice.mode in _FORCED
    messages = conversation.template_messages(request.messages, calls, profile)
    tools = None
    if callable_ and profile.knows_tools:
        tools = [function.describe() for function in callable_]
    elif callable_:
        messages = conversation.describe_tools(messages, callable_, profile, forced=forced)
    return Shape(
        messages,
        tools,
        variables,
        continued=request.continue_final_message,
        digest=_digest(request),
        profile=profile,
        functions=callable_,
        forced=forced,
        parallel=not request.HasField("parallel_tool_calls") or request.parallel_tool_calls,
        form=request.sampling.grammar if request.sampling.HasField("grammar") else None,
    )


def _digest(request: pb.ChatRequest) -> bytes:
    shaping = pb.ChatRequest(
        tools=request.tools,
        tool_choice=request.tool_choice if request.HasField("tool_choice") else None,
        template_variables=request.template_variables,
        continue_final_message=request.continue_final_message,
    )
    if request.HasField("parallel_tool_calls"):
        shaping.parallel_tool_calls = request.parallel_tool_calls
    told = shaping.SerializeToString(deterministic=True)
    return hashlib.blake2b(told, digest_size=16, person=b"kvmesh-shape-1").digest() if told else b""
