"""What every `--json` looks like, as JSON Schemas: keys may be added to an object, never renamed or left out.

    check(STATUS, json.loads(done.stdout))

Times are RFC 3339 text, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]


def check(schema: Schema, value: object) -> None:
    """Fail with every place at which `value` is not of that shape."""
    validator = Draft202012Validator(schema, format_checker=FormatChecker())
    wrong = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]
    assert not wrong, "\n".join(wrong)


def an_object(**keys: Schema) -> Schema:
    """All of these keys, and perhaps others."""
    return {"type": "object", "properties": keys, "required": list(keys)}


def a_list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def filled(schema: Schema) -> Schema:
    """The same list, not empty."""
    return schema | {"minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def a_map(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


TEXT: Final[Schema] = {"type": "string"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
SECONDS: Final[Schema] = {"type": "number", "minimum": 0}
FLAG: Final[Schema] = {"type": "boolean"}
ANYTHING: Final[Schema] = {}
# RFC 3339 with a zone; a pattern, as the format is only looked at where another package is installed.
TIME: Final[Schema] = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$"}
PLACE: Final[Schema] = {"type": "string", "pattern": r"^.+:\d+$"}
RANKS: Final[Schema] = {"type": "string", "pattern": r"^\d+(-\d+)?(,\d+(-\d+)?)*$"}
SIGNAL: Final[Schema] = {"type": "string", "pattern": r"^SIG[A-Z0-9+]+$|^signal \d+$"}

RUN_STATE = one_of(
    "waiting",
    "starting",
    "running",
    "stalled",
    "restarting",
    "stopping",
    "succeeded",
    "failed",
    "cancelled",
    "lost",
    "unreadable",
)
WORKER_STATE = one_of("pending", "starting", "running", "exited", "lost")
VERDICT = one_of("PASS", "WARN", "FAIL", "SKIP", "UNKNOWN")
DIAGNOSIS = one_of(
    *("NOT_JOINED", "MISMATCH", "DEADLOCK", "EXITED_EARLY", "STOPPED", "DSTATE", "GIL_HELD", "NETWORK", "STORAGE"),
    *("ALL_JOINED", "EXTERNAL_WAIT", "STORE_LOST", "NODE_LOST", "NOT_STARTED", "SLOW", "NONE"),
)

DIAGNOSE: Final = an_object(
    **{"class": DIAGNOSIS},
    confidence=one_of("certain", "likely", "ambiguous", "unknown"),
    culprits=a_list(
        an_object(rank=or_null(COUNT), node=or_null(TEXT), where=or_null(PLACE), op=or_null(TEXT), evidence=ANYTHING)
    ),
    waiting=a_list(an_object(ranks=ANYTHING, where=or_null(PLACE), op=or_null(TEXT))),
    missing=ANYTHING,
    bundle=or_null(TEXT),
)
STALL: Final = or_null(
    an_object(since_s=SECONDS, limit_s=SECONDS, phase=one_of("suspected", "confirmed"), verdict=or_null(DIAGNOSE))
)
REMAINING: Final = a_list(
    an_object(node=TEXT, pid=or_null(COUNT), start_time=or_null(NUMBER), command=or_null(TEXT), why=or_null(TEXT))
)
CAUSE: Final = or_null(
    an_object(
        kind=TEXT,
        node=or_null(TEXT),
        rank=or_null(COUNT),
        exit_code=or_null(INTEGER),
        signal=or_null(SIGNAL),
        message=or_null(TEXT),
        traceback=or_null(TEXT),
        certain=FLAG,
    )
)

DRY_RUN: Final = an_object(
    run=TEXT,
    world_size=or_null(COUNT),
    master_addr=or_null(TEXT),
    master_port=or_null(COUNT),
    nodes=filled(
        a_list(
            an_object(
                node=TEXT,
                node_rank=COUNT,
                address=or_null(TEXT),
                workers=or_null(
                    a_list(
                        an_object(
                            rank=or_null(COUNT),
                            local_rank=or_null(COUNT),
                            argv=filled(a_list(or_null(TEXT))),
                            env=a_map(or_null(TEXT)),
                        )
                    )
                ),
            )
        )
    ),
)
UP_DETACHED: Final = an_object(run=TEXT)
PS: Final = a_list(
    an_object(
        run=TEXT,
        name=TEXT,
        state=RUN_STATE,
        stall=STALL,
        idle_since=or_null(TIME),
        attended=FLAG,
        attempt=INTEGER,
        nodes=COUNT,
        world_size=or_null(COUNT),
        started=or_null(TIME),
        step=or_null(COUNT),
        ended=or_null(TIME),
        last_progress_s=or_null(SECONDS),
        exit_code=or_null(COUNT),
        cause=CAUSE,
        remaining=REMAINING,
        file=or_null(TEXT),
        not_started=FLAG,
    )
)
DIFF: Final = an_object(
    runs=a_list(TEXT),
    differences=a_list(
        an_object(section=TEXT, what=TEXT, nodes=a_list(TEXT), values=a_list(or_null(TEXT))),
    ),
)

STATUS: Final = an_object(
    run=TEXT,
    name=TEXT,
    state=RUN_STATE,
    attended=FLAG,
    attempt=INTEGER,
    exit_code=or_null(COUNT),
    cause=CAUSE,
    stall=STALL,
    idle_since=or_null(TIME),
    health=a_list(
        an_object(
            node=TEXT,
            gpu=or_null(COUNT),
            check=TEXT,
            status=one_of("WARN", "FAIL"),
            message=TEXT,
            action=TEXT,
        )
    ),
    remaining=REMAINING,
    warnings=a_list(TEXT),
    started=or_null(TIME),
    ended=or_null(TIME),
    start=or_null(
        an_object(
            seconds=SECONDS,
            steps=a_list(
                an_object(
                    step=TEXT,
                    seconds=SECONDS,
                    slowest=or_null(TEXT),
                    nodes=a_map(SECONDS),
                    longest=a_map(an_object(what=TEXT, seconds=SECONDS)),
                )
            ),
        )
    ),
    goodput=or_null(
        an_object(
            ratio=or_null({"type": "number", "minimum": 0, "maximum": 1}),
            **dict.fromkeys(
                ("wall_s", "productive_s", "start_s", "restart_s", "stalled_s", "lost_s", "stopping_s"), SECONDS
            ),
            is_upper_bound=FLAG,
            has_steps=FLAG,
            restarts=COUNT,
            stalls=COUNT,
            lost_steps=or_null(COUNT),
        )
    ),
    origin=or_null(
        an_object(
            user=TEXT,
            host=TEXT,
            file=TEXT,
            folder=TEXT,
            command=TEXT,
            commit=or_null(TEXT),
            branch=or_null(TEXT),
            changes=or_null(COUNT),
        )
    ),
    attempts=a_list(
        an_object(
            attempt=COUNT,
            started=or_null(TIME),
            ended=or_null(TIME),
            cause=CAUSE,
            step=or_null(COUNT),
            resume_from=or_null(TEXT),
        )
    ),
    nodes=a_list(an_object(node=TEXT, node_rank=COUNT, address=or_null(TEXT), state=TEXT)),
    workers=a_list(
        an_object(
            rank=COUNT,
            local_rank=COUNT,
            node=TEXT,
            pid=or_null(COUNT),
            state=WORKER_STATE,
            exit_code=or_null(COUNT),
            signal=or_null(SIGNAL),
            stopped=FLAG,
            step=or_null(COUNT),
            last_output_s=or_null(SECONDS),
            slow=or_null({"type": "string"}),
        )
    ),
)
LOG_LINE: Final = an_object(time=TIME, node=TEXT, rank=COUNT, attempt=COUNT, text=TEXT)
DOWN: Final = a_list(an_object(run=TEXT, state=RUN_STATE, remaining=REMAINING))
WAIT: Final = an_object(run=TEXT, state=RUN_STATE, exit_code=or_null(COUNT))
EXEC: Final = a_list(an_object(node=TEXT, exit_code=or_null(INTEGER), stdout=TEXT, stderr=TEXT, error=or_null(TEXT)))
STACKS: Final = a_list(
    an_object(
        ranks=RANKS,
        source=one_of("shim", "signal", "py-spy", "proc"),
        state=or_null(TEXT),
        wchan=or_null(TEXT),
        frames=or_null(a_list(an_object(function=TEXT, file=TEXT, line=or_null(COUNT)))),
    )
)
STATS: Final = a_list(
    an_object(
        node=TEXT,
        time=or_null(TIME),
        status=one_of("ok", "stuck", "error", "absent", "unknown"),
        reason=or_null(TEXT),
        cpu=or_null(NUMBER),
        mem=or_null(NUMBER),
        gpus=a_list(
            an_object(
                gpu=COUNT,
                util=or_null(NUMBER),
                mem_used=or_null(COUNT),
                mem_total=or_null(COUNT),
                temp_c=or_null(NUMBER),
                power_w=or_null(NUMBER),
            )
        ),
    )
)
WHO: Final = filled(
    a_list(
        an_object(
            node=TEXT,
            error=or_null(TEXT),
            gpus=a_list(COUNT),
            free_gpus=a_list(COUNT),
            free=FLAG,
            notes=a_list(TEXT),
            holders=a_list(
                an_object(
                    kind=one_of("run", "reservation", "waiting", "process", "hidden"),
                    gpus=a_list(COUNT),
                    user=or_null(TEXT),
                    name=TEXT,
                    title=TEXT,
                    head=TEXT,
                    is_here=FLAG,
                    since=or_null(TIME),
                    until=or_null(TIME),
                    note=TEXT,
                    workers=or_null(COUNT),
                    step=or_null(COUNT),
                    step_at=or_null(TIME),
                    pids=a_list(COUNT),
                    memory=or_null(COUNT),
                    util=or_null(NUMBER),
                    idle_since=or_null(TIME),
                    idle=FLAG,
                )
            ),
        )
    )
)
FINDING: Final = an_object(
    check=TEXT,
    status=VERDICT,
    message=TEXT,
    hint=or_null(TEXT),
    action=ANYTHING,
    value=ANYTHING,
    expected=ANYTHING,
    node=or_null(TEXT),
    gpu=ANYTHING,
    duration_ms=or_null(NUMBER),
)
HEALTH: Final = an_object(
    verdict=VERDICT,
    nodes=filled(
        a_list(
            an_object(
                node=TEXT,
                verdict=VERDICT,
                offence=or_null(TEXT),
                slower=a_list(TEXT),
                findings=a_list(FINDING),
                facts=ANYTHING,
            )
        )
    ),
    cluster=a_list(FINDING),
)

HISTORY: Final = a_list(
    an_object(
        node=TEXT,
        machine=TEXT,
        host_key=or_null(TEXT),
        gpus=a_list(an_object(gpu=COUNT, card=or_null(TEXT), model=or_null(TEXT))),
        checks=COUNT,
        last_check=TIME,
        counts=a_map(COUNT),
        offence=or_null(TEXT),
        records=a_list(
            an_object(
                node=TEXT, kind=one_of("lost", "failure", "verdict", "finding"), cause=TEXT, at=TIME, last_at=TIME,
                count=COUNT, gpu=or_null(COUNT), card=TEXT, status=TEXT, action=TEXT, run=TEXT, text=TEXT,
            )
        ),
    )
)  # fmt: skip

ALL: Final[Mapping[str, Schema]] = {
    "up --dry-run": DRY_RUN,
    "up -d": UP_DETACHED,
    "ps": PS,
    "status": STATUS,
    "logs": LOG_LINE,
    "down": DOWN,
    "wait": WAIT,
    "exec": EXEC,
    "stacks": STACKS,
    "stats": STATS,
    "who": WHO,
    "health": HEALTH,
    "health --history": HISTORY,
    "diagnose": DIAGNOSE,
}

DOCTOR: Final = an_object(
    verdict=one_of("PASS", "WARN", "FAIL"),
    findings=filled(a_list(FINDING)),
    controllers=a_list(an_object(run=TEXT, pid=COUNT, cpu_s=SECONDS, memory=COUNT)),
)
