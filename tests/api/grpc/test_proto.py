"""The public proto against `tests/golden/proto.txt`: what clients of TGIS and vllm-tgis-adapter have on the wire.

In the file, "?" marks explicit presence, "*" a repeated field, "|" a member of `guided`.
"""

import re
from collections.abc import Iterable, Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from repository import REPOSITORY

from tgis.pb import generation_pb2 as pb

FILE = FileDescriptorProto()
pb.DESCRIPTOR.CopyToProto(FILE)


def message_lines(path: str, messages: Iterable[DescriptorProto]) -> Iterator[str]:
    for message in messages:
        yield f"message {path}{message.name}"
        yield from (f"  {field.number} {field.name} {type_of(field, message)}" for field in message.field)
        yield from message_lines(f"{path}{message.name}.", message.nested_type)
        yield from enum_lines(f"{path}{message.name}.", message.enum_type)


def enum_lines(path: str, enums: Iterable[EnumDescriptorProto]) -> Iterator[str]:
    for enum in enums:
        yield f"enum {path}{enum.name}"
        yield from (f"  {value.number} {value.name}" for value in enum.value)


def service_lines(services: Iterable[ServiceDescriptorProto]) -> Iterator[str]:
    for service in services:
        yield f"service {FILE.package}.{service.name}"
        for method in service.method:
            assert not method.client_streaming
            given = ("stream " if method.server_streaming else "") + method.output_type
            yield f"  {method.name} {method.input_type} -> {given}".replace(".fmaas.", "")


def type_of(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = field.type_name.removeprefix(".fmaas.") or kind
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return "*" + name
    if field.proto3_optional:
        return "?" + name
    if field.HasField("oneof_index"):
        assert message.oneof_decl[field.oneof_index].name == "guided"
        return "|" + name
    return name


def test_every_field_value_and_method_is_as_it_always_was() -> None:
    lines = [*message_lines("", FILE.message_type), *enum_lines("", FILE.enum_type), *service_lines(FILE.service)]
    assert lines == (REPOSITORY / "tests/golden/proto.txt").read_text().splitlines()


DECLARATION = re.compile(r"\s*(message|enum|oneof|service|rpc)\b")
MEMBER = re.compile(r"\s*(?:(?:repeated|optional) )?(?:[\w.]+ |map<\w+, \w+> )?(\w+) = (\d+);")


def test_everything_in_the_proto_has_a_comment() -> None:
    lines = (REPOSITORY / "proto" / "generation.proto").read_text().splitlines()
    named = [i for i, line in enumerate(lines) if DECLARATION.match(line) or MEMBER.match(line)]
    silent = [lines[i].strip() for i in named if not lines[i - 1].strip().startswith("// ")]
    assert silent == []
