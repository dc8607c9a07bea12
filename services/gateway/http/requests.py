"""Bodies of the HTTP face's requests: OpenAI's fields, and ours and vLLM's beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from services.gateway.http.fields import (
    LIST,
    NAME_OR_OBJECT,
    OBJECT,
    TEXT,
    TEXT_OR_LIST,
    Name,
    Number,
    Part,
    Seed,
    Stop,
    Uint32,
)

MAX_PROMPTS = 128
# Longer than any model's context.
MAX_TOKEN_IDS = 1 << 20
# Of one message.
MAX_PARTS = 1024

ShortText = Annotated[str, Field(max_length=128)]
Ident = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]

Cache = Literal["off", "exact", "semantic"]


class CacheControl(Part):
    """Narrows the use of the answer cache, within the tenant's rights."""

    no_cache: bool = Field(default=False, description="Do not answer from the cache.")
    no_store: bool = Field(default=False, description="Do not store the answer.")
    only_if_cached: bool = Field(default=False, description="Answer from the cache or fail.")
    max_age_s: Uint32 | None = Field(default=None, description="Oldest answer that will do, in seconds.")
    tau: Number | None = Field(default=None, ge=0, le=1, description="Least similarity of a semantic hit.")


class Limits(Part):
    """Of time, for one request."""

    ttft_ms: Uint32 | None = Field(default=None, ge=1, le=3_600_000, description="Milliseconds to the first token.")
    total_ms: Uint32 | None = Field(default=None, ge=1, le=86_400_000, description="Milliseconds to the last token.")


class StreamOptions(Part):
    """Of a streamed answer."""

    include_usage: bool | None = Field(default=None, description="A last chunk with usage and no choices.")
    include_obfuscation: bool | None = Field(default=None, description="Accepted; this service adds none.")


class Generate(Part):
    """What chats and completions share."""

    model: Name = Field(description="A served model, or an alias such as auto.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = Field(default=None, ge=0, le=100, description="0 is greedy; default 1.")
    top_p: Number | None = Field(default=None, gt=0, le=1)
    n: Uint32 | None = Field(default=None, ge=1, le=16, description="Choices.")
    stop: Stop | None = Field(default=None, description="At most 16 strings.")
    seed: Seed | None = None
    max_tokens: Uint32 | None = Field(default=None, ge=1)
    frequency_penalty: Number | None = Field(default=None, ge=-2, le=2)
    presence_penalty: Number | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = Field(
        default=None,
        max_length=1024,
        description="Token id -> what is added to its logit.",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    )
    user: ShortText | None = None
    # Of other servers and of ours
    top_k: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = Field(default=None, description="0 or -1 is off.")
    min_p: Number | None = Field(default=None, ge=0, le=1)
    repetition_penalty: Number | None = Field(default=None, gt=0, le=10)
    min_tokens: Uint32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Uint32] | None = Field(default=None, max_length=64, fail_fast=True)
    regex: str | None = Field(default=None, description="The output matches it as a whole.")
    guided_regex: str | None = None
    grammar: str | None = Field(default=None, description="In the Lark dialect of llguidance.")
    guided_grammar: str | None = None
    guided_json: Annotated[Annotated[str, TEXT] | Annotated[dict[str, Any], OBJECT], NAME_OR_OBJECT] | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1, max_length=1024, fail_fast=True)
    request_id: Ident | None = Field(default=None, description="To abort by; default the x-request-id header's.")
    cache: Cache | None = None
    cache_control: CacheControl | None = None
    cache_salt: ShortText | None = None
    session_id: ShortText | None = Field(default=None, description="Requests of one session prefer one worker.")
    limits: Limits | None = None


class FunctionCall(Part):
    """A call that an assistant made."""

    name: str
    arguments: str


class ToolCall(Part):
    """In an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ContentPart(Part):
    """Of a message. This service reads text (and an assistant's refusal) alone."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    cache_control: Any = Field(default=None, description="Accepted; prefixes are remembered anyway.")


class Message(Part):
    """Of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, TEXT] | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True), LIST],
            TEXT_OR_LIST,
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=128, fail_fast=True)
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class Function(Part):
    """That the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of the arguments.")
    strict: bool | None = None


class Tool(Part):
    """Only functions are served."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    """Its name alone."""

    name: str


class NamedTool(Part):
    """The one to call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Part):
    """Form of the answer."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """text, any JSON object, or what a schema says."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


ToolMode = Annotated[Literal["none", "auto", "required"], TEXT]


class Chat(Generate):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=1024, fail_fast=True)
    max_completion_tokens: Uint32 | None = Field(default=None, ge=1, description="Goes before max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = Field(default=None, le=20, description="Needs logprobs.")
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    tool_choice: Annotated[ToolMode | Annotated[NamedTool, OBJECT], NAME_OR_OBJECT] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, description="For templates that know it.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # Known, and of no consequence here
    store: bool | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None
    # Known, and not served: they would change the answer
    modalities: list[str] | None = Field(default=None, max_length=16)
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None


TokenIds = Annotated[list[Uint32], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]


def _prompt_tag(value: Any) -> str:
    if isinstance(value, str):
        return "<string>"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "<token arrays>"
    return "<tokens>" if isinstance(value, list) and value and isinstance(value[0], int) else "<array>"


class Completion(Generate):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, TEXT]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), LIST]
        | Annotated[TokenIds, Tag("<tokens>")]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<token arrays>")],
        Discriminator(_prompt_tag),
    ]
    max_tokens: Uint32 | None = Field(default=None, description="Default 16; 0 only with echo.")
    best_of: Uint32 | None = Field(default=None, ge=1, le=16)
    echo: bool | None = None
    logprobs: Uint32 | None = Field(default=None, le=20, description="Alternatives per token.")
    suffix: str | None = None


class Embeddings(Part):
    """Body of POST /v1/embeddings."""

    model: Name
    input: Annotated[Annotated[str, TEXT] | Annotated[list[Any], Field(max_length=256), LIST], TEXT_OR_LIST]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Uint32 | None = None
    user: ShortText | None = None


class Tokenize(Part):
    """Body of POST /tokenize: a prompt or messages."""

    model: Name
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=1024, fail_fast=True)
    tools: list[Tool] | None = Field(default=None, max_length=128, fail_fast=True)
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class Abort(Part):
    """Body of POST /v1/abort."""

    request_id: Annotated[str, Field(min_length=1, max_length=160)]
