"""The public proto against a literal table of what clients of TGIS and vllm-tgis-adapter have on the wire."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from tgis.pb import generation_pb2 as pb

PROTO = Path(__file__).parents[2] / "proto" / "generation.proto"

# message: (number, name, type); "?" marks explicit presence, "*" a repeated field, "|" a member of `guided`
FIELDS = {
    "BatchedGenerationRequest": [
        (1, "model_id", "string"),
        (2, "prefix_id", "?string"),
        (3, "requests", "*GenerationRequest"),
        (4, "adapter_id", "?string"),
        (10, "params", "Parameters"),
    ],
    "SingleGenerationRequest": [
        (1, "model_id", "string"),
        (2, "prefix_id", "?string"),
        (3, "request", "GenerationRequest"),
        (4, "adapter_id", "?string"),
        (10, "params", "Parameters"),
    ],
    "GenerationRequest": [(2, "text", "string")],
    "Parameters": [
        (1, "method", "DecodingMethod"),
        (2, "sampling", "SamplingParameters"),
        (3, "stopping", "StoppingCriteria"),
        (4, "response", "ResponseOptions"),
        (5, "decoding", "DecodingParameters"),
        (6, "truncate_input_tokens", "uint32"),
    ],
    "DecodingParameters": [
        (1, "repetition_penalty", "float"),
        (2, "length_penalty", "?DecodingParameters.LengthPenalty"),
        (3, "format", "|DecodingParameters.ResponseFormat"),
        (4, "json_schema", "|string"),
        (5, "regex", "|string"),
        (6, "choice", "|DecodingParameters.StringChoices"),
        (7, "grammar", "|string"),
        (101, "frequency_penalty", "float"),
        (102, "presence_penalty", "float"),
        (103, "logit_bias", "*DecodingParameters.LogitBiasEntry"),
        (104, "watermark", "bool"),
        (105, "bad_words", "*string"),
        (106, "allowed_token_ids", "*uint32"),
    ],
    "DecodingParameters.LogitBiasEntry": [(1, "key", "uint32"), (2, "value", "float")],
    "DecodingParameters.LengthPenalty": [(1, "start_index", "uint32"), (2, "decay_factor", "float")],
    "DecodingParameters.StringChoices": [(1, "choices", "*string")],
    "SamplingParameters": [
        (1, "temperature", "?float"),
        (2, "top_k", "uint32"),
        (3, "top_p", "float"),
        (4, "typical_p", "float"),
        (5, "seed", "?uint64"),
        (101, "min_p", "float"),
    ],
    "StoppingCriteria": [
        (1, "max_new_tokens", "uint32"),
        (2, "min_new_tokens", "uint32"),
        (3, "time_limit_millis", "uint32"),
        (4, "stop_sequences", "*string"),
        (5, "include_stop_sequence", "?bool"),
        (101, "ignore_eos", "bool"),
        (102, "stop_token_ids", "*uint32"),
    ],
    "ResponseOptions": [
        (1, "input_text", "bool"),
        (2, "generated_tokens", "bool"),
        (3, "input_tokens", "bool"),
        (4, "token_logprobs", "bool"),
        (5, "token_ranks", "bool"),
        (6, "top_n_tokens", "uint32"),
        (101, "token_ids", "bool"),
    ],
    "BatchedGenerationResponse": [(1, "responses", "*GenerationResponse")],
    "GenerationResponse": [
        (2, "generated_token_count", "uint32"),
        (4, "text", "string"),
        (6, "input_token_count", "uint32"),
        (7, "stop_reason", "StopReason"),
        (8, "tokens", "*TokenInfo"),
        (9, "input_tokens", "*TokenInfo"),
        (10, "seed", "uint64"),
        (11, "stop_sequence", "string"),
    ],
    "TokenInfo": [
        (2, "text", "string"),
        (3, "logprob", "float"),
        (4, "rank", "uint32"),
        (5, "top_tokens", "*TokenInfo.TopToken"),
        (101, "id", "?uint32"),
        (102, "special", "bool"),
    ],
    "TokenInfo.TopToken": [
        (2, "text", "string"),
        (3, "logprob", "float"),
        (101, "id", "?uint32"),
        (102, "special", "bool"),
    ],
    "BatchedTokenizeRequest": [
        (1, "model_id", "string"),
        (2, "requests", "*TokenizeRequest"),
        (3, "return_tokens", "bool"),
        (4, "return_offsets", "bool"),
        (5, "truncate_input_tokens", "uint32"),
        (6, "prefix_id", "?string"),
        (7, "adapter_id", "?string"),
    ],
    "TokenizeRequest": [(1, "text", "string")],
    "BatchedTokenizeResponse": [(1, "responses", "*TokenizeResponse")],
    "TokenizeResponse": [
        (1, "token_count", "uint32"),
        (2, "tokens", "*string"),
        (3, "offsets", "*TokenizeResponse.Offset"),
    ],
    "TokenizeResponse.Offset": [(1, "start", "uint32"), (2, "end", "uint32")],
    "ModelInfoRequest": [(1, "model_id", "string")],
    "ModelInfoResponse": [
        (1, "model_kind", "ModelInfoResponse.ModelKind"),
        (2, "max_sequence_length", "uint32"),
        (3, "max_new_tokens", "uint32"),
    ],
}

ENUMS = {
    "DecodingMethod": ["GREEDY", "SAMPLE"],
    "StopReason": [
        "NOT_FINISHED",
        "MAX_TOKENS",
        "EOS_TOKEN",
        "CANCELLED",
        "TIME_LIMIT",
        "STOP_SEQUENCE",
        "TOKEN_LIMIT",
        "ERROR",
    ],
    "DecodingParameters.ResponseFormat": ["TEXT", "JSON"],
    "ModelInfoResponse.ModelKind": ["DECODER_ONLY", "ENCODER_DECODER"],
}

METHODS = [
    ("Generate", "BatchedGenerationRequest", "BatchedGenerationResponse", False),
    ("GenerateStream", "SingleGenerationRequest", "GenerationResponse", True),
    ("Tokenize", "BatchedTokenizeRequest", "BatchedTokenizeResponse", False),
    ("ModelInfo", "ModelInfoRequest", "ModelInfoResponse", False),
]

SCALARS = {
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_FLOAT: "float",
    FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_UINT32: "uint32",
    FieldDescriptorProto.TYPE_UINT64: "uint64",
}

FILE = FileDescriptorProto()
pb.DESCRIPTOR.CopyToProto(FILE)


def messages(path: str, found: Iterable[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
    for message in found:
        yield path + message.name, message
        yield from messages(f"{path}{message.name}.", message.nested_type)


def type_of(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    name = field.type_name.removeprefix(".fmaas.") or SCALARS[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return "*" + name
    if field.proto3_optional:
        return "?" + name
    if field.HasField("oneof_index"):
        assert message.oneof_decl[field.oneof_index].name == "guided"
        return "|" + name
    return name


def test_every_field_has_its_number_and_type() -> None:
    found = {
        name: [(field.number, field.name, type_of(field, message)) for field in message.field]
        for name, message in messages("", FILE.message_type)
    }
    assert found == FIELDS


def test_every_enum_value_has_its_number() -> None:
    enums = {enum.name: enum for enum in FILE.enum_type}
    for path, message in messages("", FILE.message_type):
        enums |= {f"{path}.{enum.name}": enum for enum in message.enum_type}
    found = {name: [(value.number, value.name) for value in enum.value] for name, enum in enums.items()}
    assert found == {name: list(enumerate(values)) for name, values in ENUMS.items()}


def test_service_has_its_methods_under_the_names_on_the_wire() -> None:
    (service,) = FILE.service
    assert (FILE.package, service.name) == ("fmaas", "GenerationService")
    found = [(method.name, method.input_type, method.output_type, method.server_streaming) for method in service.method]
    assert found == [(name, f".fmaas.{asked}", f".fmaas.{given}", s) for name, asked, given, s in METHODS]
    assert not any(method.client_streaming for method in service.method)


DECLARATION = re.compile(r"\s*(message|enum|oneof|service|rpc)\b")
MEMBER = re.compile(r"\s*(?:(?:repeated|optional) )?(?:[\w.]+ |map<\w+, \w+> )?(\w+) = (\d+);")


def test_everything_in_the_proto_has_a_comment() -> None:
    lines = PROTO.read_text().splitlines()
    named = [i for i, line in enumerate(lines) if DECLARATION.match(line) or MEMBER.match(line)]
    silent = [lines[i].strip() for i in named if not lines[i - 1].strip().startswith("// ")]
    assert silent == []
