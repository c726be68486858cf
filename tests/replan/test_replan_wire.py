import random

import programs
import pytest
from google.protobuf import descriptor_pb2

from graphacc._compat import jax_ as compat
from graphacc.runtime.replan.envelope import open_envelope
from graphacc.runtime.replan.errors import NotUnderstood
from graphacc.runtime.replan.schema import find_unknown_fields, read_schema
from graphacc.runtime.replan.wire import encode_fields, encode_varint, read_fields, read_varint


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**63 - 1])
def test_varint_round_trip(value):
    encoded = encode_varint(value)
    assert read_varint(b"xx" + encoded, 2) == (value, 2 + len(encoded))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80" * 11])
def test_bad_varint_is_refused(data):
    with pytest.raises(NotUnderstood, match="length field"):
        read_varint(data)


def test_fields_round_trip():
    fields = [(1, b"abc"), (2, b""), (1, b"x" * 200)]
    assert read_fields(encode_fields(fields)) == fields


def test_fields_of_another_wire_type_are_refused():
    with pytest.raises(NotUnderstood, match="wire type 0"):
        read_fields(b"\x08\x01")


def test_envelope_round_trip():
    data = programs.serialized("training_step")
    envelope = open_envelope(data)
    assert envelope.with_executable(envelope.executable) == data
    assert open_envelope(envelope.with_executable(b"other")).executable == b"other"


def test_truncated_envelopes_are_refused():
    data = programs.serialized("training_step")
    random.seed(0)
    for length in [0, 1, 2, *random.sample(range(3, len(data)), 40)]:
        with pytest.raises(NotUnderstood):
            open_envelope(data[:length])


def test_schema_has_what_the_library_has():
    schema = read_schema(compat.xla_library())
    kinds = schema.message_class("xla.cpu.ThunkProto").DESCRIPTOR.oneofs_by_name["impl"].fields
    assert {"kernel_thunk", "while_thunk", "collective_thunk"} <= {field.name for field in kinds}


def test_missing_message_is_named():
    with pytest.raises(NotUnderstood, match="xla.cpu.NoSuchProto"):
        read_schema(compat.xla_library()).message_class("xla.cpu.NoSuchProto")


def test_unknown_fields_are_found_below_the_root():
    field = descriptor_pb2.FieldDescriptorProto.FromString(b"\x0a\x01f" + encode_varint(1000 << 3 | 2) + b"\x01z")
    message = descriptor_pb2.DescriptorProto(name="m")
    assert find_unknown_fields(message) == []
    message.field.append(field)
    assert find_unknown_fields(message) == [".field#1000"]
