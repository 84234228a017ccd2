import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(before, after, path):
    """Yields what of one value the other one lacks; what it has besides are defaults."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from lost(value, after[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after)):
            yield from lost(*pair, f"{path}/{number}")
    elif before != after:
        yield f"{path}: {before} {after}"


register_default_plugins()
with open(sys.argv[1]) as file:
    printed = json.load(file)
for line in lost(printed, json.loads(JSONEncoder().encode(Dashboard.from_json(printed))), ""):
    print(line)
