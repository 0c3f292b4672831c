"""The public proto: what clients of TGIS and vllm-tgis-adapter have on the wire."""

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from repository import REPOSITORY

from tgis.pb import generation_pb2 as pb


def test_every_field_value_and_method_is_as_it_always_was() -> None:
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    assert text_format.MessageToString(file) == (REPOSITORY / "tests/golden/generation.textproto").read_text()
