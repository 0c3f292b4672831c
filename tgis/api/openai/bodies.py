"""Request and response bodies of the OpenAI API, with the extensions of vLLM; null is the same as absent."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Limit = Annotated[int, Meta(ge=-1, le=2**32 - 1)]  # -1: none
Stop = str | list[str]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk


class StructuredOutputs(Struct):
    """A constraint on the output, as in vLLM: exactly one field is set."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class PredictedOutput(Struct):
    """A text that the output probably repeats in part."""

    content: str | list[ContentPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class SamplingBody(Struct, kw_only=True):
    """The common fields of chat and completion requests."""

    model: str | None = None
    add_special_tokens: bool | None = None  # null: only in completions; chat templates write them
    allowed_token_ids: tuple[Count, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    frequency_penalty: float | None = None
    guided_choice: list[str] | None = None  # guided_...: older names of structured_outputs
    guided_grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: Limit | None = None
    min_p: float | None = None
    min_tokens: Count | None = None
    n: Count | None = None
    prediction: PredictedOutput | None = None
    presence_penalty: float | None = None
    prompt_logprobs: Count | None = None  # number of candidates for each prompt token
    repetition_penalty: float | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop: Stop | None = None
    stop_token_ids: list[Count] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    temperature: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: float | None = None
    truncate_prompt_tokens: Limit | None = None  # keep the last n tokens; -1 keeps all that fit
    user: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: Any = None  # an object or its JSON


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None


class Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # constrain the arguments to their schema


class Tool(Struct):
    function: Function
    type: str = "function"


class ChatOptions(SamplingBody, kw_only=True):
    """The common fields of chats and responses."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None  # a variable of many templates; also in chat_template_kwargs
    parallel_tool_calls: bool | None = None
    top_logprobs: Count | None = None


class ChatCompletionRequest(ChatOptions, kw_only=True):
    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # null: true if the assistant wrote it and add_generation_prompt is null
    logprobs: bool | None = None
    max_completion_tokens: Limit | None = None
    reasoning_effort: str | None = None
    tool_choice: str | Tool | None = None
    tools: list[Tool] | None = None


class PromptTokenizeRequest(ChatCompletionRequest, kw_only=True):
    """A prompt or the messages of a chat, in the format of vLLM."""

    messages: list[ChatMessage] = []
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct):
    tokens: list[Count]


class CompletionRequest(SamplingBody, kw_only=True):
    prompt: str | list[str | Count | list[Count]]  # texts or token ids
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    suffix: str | None = None


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct, omit_defaults=True):
    """A function call; in a stream, the next piece of its arguments."""

    arguments: str
    name: str | None = None


class CalledTool(Struct, omit_defaults=True):
    """A tool call; in a stream, its first piece has the id and the type."""

    function: CalledFunction
    index: int | None = None  # null outside streams
    id: str | None = None
    type: str | None = None


class AssistantMessage(Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same, by its older name
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # null for the first token


class _Answer(Struct, kw_only=True):
    """The common fields of answers and chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_Answer, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(_Answer, kw_only=True):
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(_Answer, kw_only=True):
    """A complete answer, or a chunk of a stream."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class Model(Struct):
    id: str
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None = None  # the base model of an adapter
    object: str = "model"


class ModelList(Struct):
    data: list[Model]
    object: str = "list"


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    http_status_code: int  # events of streams have no status line


class ErrorBody(Struct):
    error: ErrorDetail
    error_type: str  # clients of TGI read it here, too
