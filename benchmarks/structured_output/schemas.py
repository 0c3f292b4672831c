"""JSON schemas by category: features of JSON Schema, and what clients send.

The latter are written in the manner of JSONSchemaBench's collections, of tools, and of pydantic's output.
"""

from typing import Any

from benchmarks.structured_output.features import BOOLEAN, FEATURES, INTEGER, NUMBER, STRING, closed


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string"} | more


def one_of(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items} | more


def mapping(values: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def optional(schema: Any) -> dict[str, Any]:
    """An optional value, as pydantic writes it."""
    return {"anyOf": [schema, {"type": "null"}], "default": None}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    """A call of a function with these parameters."""
    return closed(name={"const": name}, arguments=closed(required, **properties))


DATE_TIME, DATE, EMAIL, URI = (text(format=name) for name in ("date-time", "date", "email", "uri"))
COUNT, SHARE = {"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0, "maximum": 1}
QUANTITY = text(pattern="^[0-9]+(m|Mi|Gi|k)?$")
NAME = text(pattern="^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", maxLength=63)
METADATA = {
    "type": "object",
    "properties": {
        "name": NAME,
        "namespace": NAME,
        "labels": mapping(text(maxLength=63)),
        "annotations": mapping(STRING),
    },
    "required": ["name"],
    "additionalProperties": False,
}
CONTAINER = {
    "type": "object",
    "properties": {
        "name": NAME,
        "image": STRING,
        "command": array(STRING),
        "env": array(closed(["name"], name=text(pattern="^[A-Z_][A-Z0-9_]*$"), value=STRING)),
        "ports": array(
            closed(["containerPort"], containerPort={"type": "integer", "minimum": 1, "maximum": 65535}, name=NAME)
        ),
        "resources": closed([], limits=mapping(QUANTITY), requests=mapping(QUANTITY)),
        "imagePullPolicy": one_of("Always", "IfNotPresent", "Never"),
    },
    "required": ["name", "image"],
    "additionalProperties": False,
}


def resource(api_version: str, kind: str, spec: Any) -> dict[str, Any]:
    """A resource of Kubernetes."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "apiVersion": one_of(api_version),
            "kind": one_of(kind),
            "metadata": {"$ref": "#/definitions/metadata"},
            "spec": spec,
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "definitions": {"metadata": METADATA, "container": CONTAINER},
    }


CLIENTS: dict[str, list[Any]] = {
    "tools": [
        tool("get_current_weather", ["location"], location=STRING, unit=one_of("celsius", "fahrenheit")),
        tool("send_email", ["to", "subject"], to=array(EMAIL, minItems=1), subject=STRING, body=STRING),
        tool("calculate_bmi", ["weight", "height"], weight=NUMBER, height={"type": "number", "exclusiveMinimum": 0}),
        tool(
            "create_event",
            ["title", "start"],
            title=text(maxLength=80),
            start=DATE_TIME,
            minutes={"type": "integer", "minimum": 5, "maximum": 480},
            attendees=array(closed(["email"], name=STRING, email=EMAIL), maxItems=10),
            recurrence=closed(frequency=one_of("daily", "weekly", "monthly"), count={"type": "integer", "minimum": 1}),
        ),
        tool(
            "convert_currency",
            ["amount", "from", "to"],
            **{
                "amount": {"type": "number", "minimum": 0},
                "from": text(pattern="^[A-Z]{3}$"),
                "to": text(pattern="^[A-Z]{3}$"),
            },
        ),
        tool("run_sql", ["query"], query=text(minLength=1), parameters=array({"type": ["string", "number", "null"]})),
        tool("get_stock_prices", ["symbols"], symbols=array(text(pattern="^[A-Z]{1,5}$"), minItems=1, maxItems=5)),
        array(
            {
                "anyOf": [
                    tool("now", []),
                    tool("add", ["a", "b"], a=NUMBER, b=NUMBER),
                    tool("log", ["text"], text=STRING),
                ]
            },
            minItems=1,
            maxItems=3,
        ),
    ],
    "events": [
        closed(
            ["targetUrl"],
            elementId=text(maxLength=255),
            elementClasses=array(text(maxLength=40), maxItems=8),
            targetUrl=text(format="uri"),
        ),
        closed(
            ["sku", "quantity"],
            sku=text(maxLength=50),
            name={"type": ["string", "null"], "maxLength": 100},
            unitPrice={"type": ["number", "null"], "minimum": 0, "maximum": 1_000_000},
            quantity={"type": "integer", "minimum": 1, "maximum": 9999},
            currency={"type": ["string", "null"], "pattern": "^[A-Z]{3}$"},
        ),
        closed(
            ["latitude", "longitude"],
            latitude={"type": "number", "minimum": -90, "maximum": 90},
            longitude={"type": "number", "minimum": -180, "maximum": 180},
            altitude={"type": ["number", "null"]},
            bearing={"type": ["number", "null"], "minimum": 0, "maximum": 360},
            timestamp={"type": ["integer", "null"], "minimum": 0},
        ),
        closed(
            ["osType", "osVersion", "deviceModel"],
            osType=one_of("ios", "android", "tvos"),
            osVersion=text(maxLength=20),
            deviceModel=text(maxLength=40),
            networkType=one_of("mobile", "wifi", "offline", None),
            batteryLevel={"type": ["integer", "null"], "minimum": 0, "maximum": 100},
            session=closed(
                id=text(format="uuid"), index=COUNT, previous={"type": ["string", "null"], "format": "uuid"}
            ),
        ),
        closed(
            ["id", "type", "time"],
            id=text(minLength=1, maxLength=64),
            source=URI,
            specversion={"const": "1.0"},
            type=text(pattern="^[a-z]+(\\.[a-z]+)+$"),
            time=DATE_TIME,
            data={},
        ),
        closed(ip={"anyOf": [text(format="ipv4"), text(format="ipv6")]}, host=text(format="hostname"), at=DATE),
    ],
    "configuration": [
        {
            "type": "object",
            "properties": {
                "name": text(pattern="^[a-z0-9-~][a-z0-9-._~]*$", maxLength=214),
                "version": text(pattern="^\\d+\\.\\d+\\.\\d+$"),
                "private": BOOLEAN,
                "license": STRING,
                "keywords": array(STRING),
                "scripts": mapping(STRING),
                "dependencies": mapping(STRING),
                "repository": {"anyOf": [STRING, closed(["url"], type=STRING, url=STRING, directory=STRING)]},
                "engines": {"type": "object", "properties": {"node": STRING}, "additionalProperties": STRING},
            },
            "required": ["name", "version"],
            "additionalProperties": False,
        },
        closed(
            ["on", "jobs"],
            name=STRING,
            on={
                "anyOf": [one_of("push", "pull_request"), array(one_of("push", "pull_request", "release"), minItems=1)]
            },
            jobs={
                "type": "object",
                "patternProperties": {
                    "^[_a-zA-Z][a-zA-Z0-9_-]*$": closed(
                        ["runs-on", "steps"],
                        **{
                            "runs-on": STRING,
                            "needs": array(STRING),
                            "timeout-minutes": {"type": "number", "exclusiveMinimum": 0},
                            "steps": array(
                                {"anyOf": [closed(["run"], name=STRING, run=STRING), closed(["uses"], uses=STRING)]},
                                minItems=1,
                            ),
                        },
                    )
                },
                "minProperties": 1,
                "additionalProperties": False,
            },
        ),
        {
            "type": "object",
            "properties": {
                "compilerOptions": {
                    "type": "object",
                    "properties": {
                        "target": one_of("es2020", "es2022", "esnext"),
                        "module": one_of("commonjs", "nodenext"),
                        "strict": BOOLEAN,
                        "outDir": STRING,
                        "lib": array(one_of("dom", "es2022", "webworker")),
                        "paths": mapping(array(STRING)),
                    },
                },
                "include": array(STRING),
                "references": array(closed(path=STRING)),
            },
        },
        closed(
            ["services"],
            services={
                "type": "object",
                "patternProperties": {
                    "^[a-zA-Z0-9._-]+$": closed(
                        ["image"],
                        image=STRING,
                        ports=array({"type": ["string", "integer"]}),
                        environment={"anyOf": [mapping({"type": ["string", "number", "null"]}), array(STRING)]},
                        restart=one_of("no", "always", "on-failure", "unless-stopped"),
                        deploy=closed(["replicas"], replicas=COUNT),
                    )
                },
                "additionalProperties": False,
            },
            volumes=mapping({"type": ["object", "null"]}),
        ),
        closed(
            ["version", "updates"],
            version={"const": 2},
            updates=array(
                {
                    "type": "object",
                    "properties": {
                        "package-ecosystem": one_of("npm", "pip", "docker", "cargo"),
                        "directory": text(pattern="^/"),
                        "schedule": closed(
                            ["interval"], interval=one_of("daily", "weekly"), time=text(pattern="^\\d\\d:\\d\\d$")
                        ),
                        "open-pull-requests-limit": COUNT,
                    },
                    "required": ["package-ecosystem", "directory", "schedule"],
                    "additionalProperties": False,
                },
                minItems=1,
            ),
        ),
        {
            "type": "object",
            "properties": {
                "printWidth": COUNT,
                "semi": BOOLEAN,
                "endOfLine": {"oneOf": [{"const": "lf"}, {"const": "crlf"}]},
                "overrides": array({"type": "object", "properties": {"files": STRING}, "required": ["files"]}),
            },
        },
    ],
    "Kubernetes": [
        resource(
            "v1", "Pod", closed(["containers"], containers=array({"$ref": "#/definitions/container"}, minItems=1))
        ),
        resource(
            "v1",
            "Service",
            closed(
                ["ports"],
                type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
                selector=mapping(STRING),
                ports=array(
                    closed(["port"], port=COUNT, targetPort={"anyOf": [COUNT, NAME]}, protocol=one_of("TCP", "UDP")),
                    minItems=1,
                ),
            ),
        ),
        resource(
            "apps/v1",
            "Deployment",
            closed(
                replicas=COUNT,
                selector=closed(matchLabels=mapping(STRING)),
                template=closed(
                    metadata={"$ref": "#/definitions/metadata"},
                    spec=closed(containers=array({"$ref": "#/definitions/container"}, minItems=1)),
                ),
            ),
        ),
        resource(
            "autoscaling/v2",
            "HorizontalPodAutoscaler",
            closed(
                ["scaleTargetRef", "maxReplicas"],
                scaleTargetRef=closed(apiVersion=STRING, kind=STRING, name=NAME),
                minReplicas={"type": "integer", "minimum": 1},
                maxReplicas={"type": "integer", "minimum": 1},
            ),
        ),
        resource(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            closed(
                ["podSelector"],
                podSelector=closed([], matchLabels=mapping(STRING)),
                policyTypes=array(one_of("Ingress", "Egress"), maxItems=2),
                ingress=array(closed([], ports=array(closed(["port"], port=COUNT, protocol=STRING)))),
            ),
        ),
    ],
    "documents": [
        closed(
            ["type", "headline", "content"],
            type={"const": "story"},
            headline=text(minLength=1, maxLength=120),
            published=DATE_TIME,
            credits=array(closed(["name"], name=STRING, url=URI)),
            content=array({"anyOf": [ref("text"), ref("image"), ref("quote")]}, minItems=1),
        )
        | {
            "$defs": {
                "text": closed(type={"const": "text"}, content=STRING),
                "image": closed(["type", "url"], type={"const": "image"}, url=URI, width=COUNT, caption=STRING),
                "quote": closed(["type", "content"], type={"const": "quote"}, content=array(ref("text")), by=STRING),
            }
        },
        closed(
            ["invoice_number", "lines"],
            invoice_number=text(pattern="^INV-[0-9]{4,8}$"),
            issued=DATE,
            vendor=closed(["name"], name=STRING, vat=optional(text(pattern="^[A-Z]{2}[0-9A-Z]{2,12}$"))),
            lines=array(
                closed(description=STRING, quantity={"type": "number", "exclusiveMinimum": 0}, cents=INTEGER),
                minItems=1,
            ),
            currency=one_of("EUR", "USD", "GBP"),
        ),
        closed(
            title=STRING,
            servings={"type": "integer", "minimum": 1, "maximum": 24},
            ingredients=array(closed(["item"], item=STRING, grams=optional(NUMBER)), minItems=1, maxItems=20),
            steps=array(text(minLength=1), minItems=1),
        ),
        {
            "title": "Resume",
            "type": "object",
            "properties": {
                "name": {"title": "Name", "type": "string"},
                "email": optional(EMAIL),
                "jobs": {"title": "Jobs", "type": "array", "items": ref("Job")},
                "skills": {"title": "Skills", "type": "array", "items": STRING, "default": []},
            },
            "required": ["name", "jobs"],
            "$defs": {
                "Job": {
                    "title": "Job",
                    "description": "One position.",
                    "type": "object",
                    "properties": {"title": STRING, "since": DATE, "until": optional(DATE), "level": ref("Level")},
                    "required": ["title", "since"],
                },
                "Level": {"title": "Level", "enum": ["junior", "senior", "lead"], "type": "string"},
            },
        },
        closed(
            thoughts=array(closed(explanation=STRING, output=STRING), maxItems=5),
            sentiment=one_of("positive", "neutral", "negative"),
            confidence=SHARE,
            citations=array(closed(source=URI, start=COUNT, end=COUNT)),
        ),
    ],
    "recursion": [
        closed(["value"], value=INTEGER, children=array({"$ref": "#"}, maxItems=3)),
        ref("expression")
        | {
            "$defs": {
                "expression": {
                    "anyOf": [
                        NUMBER,
                        closed(variable=text(pattern="^[a-z]$")),
                        closed(operator=one_of("+", "-", "*", "/"), left=ref("expression"), right=ref("expression")),
                    ]
                }
            }
        },
        ref("filter")
        | {
            "$defs": {
                "filter": {
                    "anyOf": [
                        closed(field=STRING, op=one_of("eq", "lt", "gt"), value={"type": ["string", "number"]}),
                        {
                            "oneOf": [
                                closed(None, **{"and": array(ref("filter"))}),
                                closed(None, **{"or": array(ref("filter"))}),
                            ]
                        },
                    ]
                }
            }
        },
        ref("element")
        | {
            "$defs": {
                "element": closed(
                    ["tag"],
                    tag=one_of("div", "button", "input"),
                    attributes=array(closed(name=STRING, value=STRING), maxItems=3),
                    children=array(ref("element"), maxItems=3),
                )
            }
        },
        closed(["id", "text"], id=COUNT, text=STRING, replies=array({"$ref": "#"})),
    ],
}

SCHEMAS = FEATURES | CLIENTS
