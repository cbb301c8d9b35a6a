"""The OpenAPI document, made of the endpoints and their bodies, and the page that shows it."""

import html
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic.json_schema import models_json_schema

from .endpoint import Endpoint

_REFERENCE = "#/components/schemas/{model}"


def openapi(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """Returns an OpenAPI 3.1 document.

    Args:
        endpoints: The endpoints.
        version: Of the server.
    """
    endpoints = list(endpoints)
    bodies = list(dict.fromkeys(e.body for e in endpoints if e.body is not None))
    schemas, definitions = models_json_schema([(b, "validation") for b in bodies], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        for method in endpoint.methods:
            operation: dict[str, Any] = {
                "summary": (inspect.getdoc(endpoint.endpoint) or "").partition("\n")[0],
                "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
                "tags": [endpoint.group],
                "responses": {"200": {"description": "The answer."}, "default": {"description": "An error, as JSON."}},
            }
            if "{" in path:
                name = path[path.index("{") + 1 : path.index("}")]
                place = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                operation["parameters"] = [place]
            if method == "POST" and endpoint.body is not None:
                schema = schemas[(endpoint.body, "validation")]
                operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "bijax serve", "version": version},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def docs_page(document: dict[str, Any]) -> str:
    """Returns a page that lists the endpoints of a document with their fields. It loads nothing."""
    return "\n".join(_lines(document))


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>bijax serve: endpoints</title>
<meta name="viewport" content="width=device-width">
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark}
code{font-family:ui-monospace,monospace}summary{cursor:pointer;padding:.3em 0}td,th{text-align:left;padding:.1em 1em
.1em 0;vertical-align:top}details{border-top:1px solid #8884}.method{display:inline-block;width:4em;opacity:.7}</style>
<h1>Endpoints</h1><p>As <a href="/openapi.json">OpenAPI</a>. The <a href="/">playground</a>.</p>"""


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield _HEAD
    schemas = document["components"]["schemas"]
    group = None
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != group:
                group = operation["tags"][0]
                yield f"<h2>{html.escape(group)}</h2>"
            yield (
                f'<details><summary><span class="method">{method.upper()}</span><code>{html.escape(path)}</code> '
                f"{html.escape(operation['summary'])}</summary>"
            )
            reference = (
                operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            )
            fields = schemas.get(reference.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
            if fields:
                yield "<table><tr><th>field</th><th>type</th><th>default</th></tr>"
                for name, field in sorted(fields.items()):
                    default = html.escape(str(field.get("default", "")))
                    yield f"<tr><td><code>{name}</code></td><td>{html.escape(_type(field))}</td><td>{default}</td></tr>"
                yield "</table>"
            yield "</details>"
    yield "</html>"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    for kind in ("anyOf", "oneOf"):
        if kind in field:
            return " or ".join(dict.fromkeys(_type(one) for one in field[kind]))
    if "enum" in field or "const" in field:
        return " or ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
