"""The examples of /docs, against a real server."""

import html
import json
import re
import shlex
from pathlib import Path

from harness import running_fake


def test_every_operation_has_a_sentence_and_an_example_that_runs(tmp_path: Path) -> None:
    with running_fake(tmp_path, {}, "{{ messages[0]['content'] }}") as server:
        page, document = server.get("/docs")[1], json.loads(server.get("/openapi.json")[1])
        operations = [each for methods in document["paths"].values() for each in methods.values()]
        assert operations
        assert not [operation["summary"] for operation in operations if f"<p>{operation['summary']}</p>" in page]
        commands = [html.unescape(each) for each in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
        assert len(commands) == len(operations)
        for command in commands:
            _, address, *flags = shlex.split(command)
            host, slash, path = address.partition("/")
            assert host == f"localhost:{server.http_port}"
            body = flags[flags.index("-d") + 1].encode() if flags else None
            status, answer = server.get(slash + path) if body is None else server.post(slash + path, body)
            assert (status, bool(answer)) == (200, True), command
