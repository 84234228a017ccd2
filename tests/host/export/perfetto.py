# Reads a trace with Perfetto's official messages and writes what is in it as JSON.
import json
import sys
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

trace = protos.Trace()
with open(sys.argv[1], "rb") as file:
    trace.ParseFromString(file.read())


def unknown(message):
    """How many fields the messages do not know, at any depth."""
    found = len(UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            repeated = (
                not isinstance(value, type(message))
                and hasattr(value, "__len__")
                and not hasattr(value, "ListFields")
            )
            found += sum(unknown(item) for item in (value if repeated else [value]))
    return found


out = {
    "tracks": [],
    "slices": [],
    "instants": [],
    "counters": [],
    "snapshots": [],
    "unmatched": [],
    "unknown_fields": unknown(trace),
}
stacks = {}
kinds = protos.TrackEvent.Type
before = 0
for packet in trace.packet:
    if packet.HasField("clock_snapshot"):
        snapshot = packet.clock_snapshot
        clocks = {str(c.clock_id): c.timestamp for c in snapshot.clocks}
        out["snapshots"].append({"primary": snapshot.primary_trace_clock, **clocks})
    if packet.HasField("track_descriptor"):
        track = packet.track_descriptor
        parent = track.parent_uuid if track.HasField("parent_uuid") else None
        out["tracks"].append(
            {
                "uuid": track.uuid,
                "name": track.name,
                "parent": parent,
                "counter": track.HasField("counter"),
            }
        )
    if not packet.HasField("track_event"):
        continue
    event, at = packet.track_event, packet.timestamp
    assert at >= before, "events are not in order of time"
    before = at
    if event.type == kinds.TYPE_SLICE_BEGIN:
        annotations = {}
        for item in event.debug_annotations:
            is_number = item.HasField("uint_value")
            annotations[item.name] = item.uint_value if is_number else item.string_value
        item = {
            "track": event.track_uuid,
            "name": event.name,
            "begin": at,
            "end": None,
            "annotations": annotations,
            "categories": list(event.categories),
            "flows": list(event.flow_ids),
            "terminating": list(event.terminating_flow_ids),
        }
        out["slices"].append(item)
        stacks.setdefault(event.track_uuid, []).append(item)
    elif event.type == kinds.TYPE_SLICE_END:
        stack = stacks.get(event.track_uuid)
        if stack:
            stack.pop()["end"] = at
        else:
            out["unmatched"].append([event.track_uuid, at])
    elif event.type == kinds.TYPE_INSTANT:
        out["instants"].append({"track": event.track_uuid, "name": event.name, "at": at})
    elif event.type == kinds.TYPE_COUNTER:
        out["counters"].append({"track": event.track_uuid, "at": at, "value": event.counter_value})
json.dump(out, sys.stdout)
