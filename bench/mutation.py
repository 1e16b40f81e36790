"""Mutation score of the four modules that matter most: do their tests notice a change of one expression?

A seeded sample of small changes to the operator's plan and cause, the runtime's HEAD and its data sampler.
The tests are collected once, in a copy of the commit. Each change replaces the code of one function in a
forked child, which runs the tests that execute the changed line until the first failure. A change that no
test notices has survived.

    python bench/mutation.py --output before.json
    python bench/mutation.py --like before.json --output after.json    # the corresponding changes

The last line is JSON. Every change, and which survived, is in the output file. The same command goes on
where a run was ended.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import collections
import contextlib
import gc
import glob
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import pytest

os.environ["OMP_NUM_THREADS"] = "1"

HEAD: Final = "runtime/spottrain/checkpoint/head"
DATA: Final = "runtime/spottrain/data"
SOURCES: Final = {
    "plan": ("operator/spottrain_operator/control/plan.py",),
    "cause": ("operator/spottrain_operator/policies/cause.py",),
    "head": tuple(f"{HEAD}/{name}.py" for name in ("state", "compare_and_swap", "owner", "admin")),
    "sampler": tuple(f"{DATA}/{name}.py" for name in ("sampler", "plan", "shuffle")),
}
TESTS: Final = (
    "tests/unit/controller",
    "tests/unit/runtime/checkpoint/test_head_*.py",
    "tests/unit/runtime/cli",
    *(f"tests/unit/runtime/data/test_{name}.py" for name in ("sampler", "plan", "ranks")),
)
"""The tests of single behaviours that reach these modules, as glob patterns."""
SEARCHES: Final = (
    *(
        f"--ignore=tests/unit/controller/test_{name}.py"
        for name in ("properties", "crashes", "words_from_outside")
    ),
    "--ignore=tests/unit/runtime/checkpoint/test_head_model.py",
)
"""Left out: random histories and every crash; half a minute for every change that survives the others."""
REPOSITORY: Final = Path(__file__).parents[1]
LOG: Final = os.dup(2)
"""Standard error, duplicated before pytest captures it."""
COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, ...]]] = {
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
ARITHMETIC: Final[dict[type[ast.operator], str]] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
}


@dataclass(kw_only=True)
class Mutant:
    """One change. (file, function, operator, ordinal) names it in any later version of the code."""

    module: str
    file: str
    function: str
    operator: str
    ordinal: int
    line: int
    statement: int
    """The line on which the innermost statement around it begins."""
    before: str
    after: str
    outcome: str = ""
    """killed, timeout or survived."""
    killer: str = ""
    start: int = field(default=0, repr=False)
    end: int = field(default=0, repr=False)

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.file, self.function, self.operator, self.ordinal


# --- finding the possible changes ------------------------------------------------------------------------
def changes(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[tuple[str, ast.AST, str]]:
    """The changes of one node: the operator's name, the node to replace, its new text."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            for name, symbol in zip(("compare", "compare-opposite"), COMPARISONS[type(op)], strict=False):
                yield name, node, f"({text(left)} {symbol} {text(right)})"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield "and-or", node, "(" + word.join(f"({text(v)})" for v in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", node, f"({text(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield "arithmetic", node, f"(({text(left)}) {ARITHMETIC[type(op)]} ({text(right)}))"
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, repr(value + 1)
        case _:
            yield from statement_changes(node, text)


def statement_changes(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[tuple[str, ast.AST, str]]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, f"(not ({text(test)}))"
        case ast.comprehension(ifs=ifs):
            yield from (("condition", test, f"(not ({text(test)}))") for test in ifs)
        case ast.Return(value=ast.expr() as value) if not (
            isinstance(value, ast.Constant) and value.value is None
        ):
            yield "return-none", value, "None"
        case ast.Continue() | ast.Break():
            yield "delete", node, "pass"
        case (
            ast.Expr(value=ast.Call())
            | ast.AugAssign()
            | ast.Raise()
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
        ):  # not "pass": a function keeps its closure only while its text names the outer variables
            yield "delete", node, f"if 0: {text(node)}"


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that run, without annotations, decorators, defaults and f-strings.

    Python 3.11 gives wrong positions for what is inside an f-string.
    """
    if isinstance(node, ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        parts = value if isinstance(value, list) else [value]
        yield from (part for part in parts if isinstance(part, ast.AST))


def mutants(module: str, file: str, source: str) -> list[Mutant]:
    """Every possible change of one file, in the order of the text."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counts: dict[tuple[str, str], int] = collections.Counter()
    found: list[Mutant] = []

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.AST) -> str:
        start, end = span(node)
        return source.encode()[start:end].decode()

    def visit(node: ast.AST, function: str, runs: bool, statement: int = 0) -> None:
        """`runs`: whether this is inside a function, not executed by the import alone."""
        statement = node.lineno if isinstance(node, ast.stmt) else statement
        for operator, target, after in changes(node, text) if runs else ():
            start, end = span(target)
            found.append(
                Mutant(
                    module=module,
                    file=file,
                    function=function,
                    operator=operator,
                    ordinal=counts[function, operator],
                    line=source.encode()[:start].count(b"\n") + 1,
                    statement=statement,
                    before=text(target),
                    after=after,
                    start=start,
                    end=end,
                )
            )
            counts[function, operator] += 1
        for child in children(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(
                    child, f"{function}.{child.name}".lstrip("."), runs or not isinstance(child, ast.ClassDef)
                )
            else:
                visit(child, function, runs, statement)

    visit(ast.parse(source), "", False)
    return found


def sample(module: str, possible: list[Mutant], number: int, seed: int) -> list[Mutant]:
    chosen = random.Random(f"{seed} {module}").sample(possible, min(number, len(possible)))
    return sorted(chosen, key=lambda m: (m.file, m.start))


def corresponding(earlier: list[dict[str, Any]], possible: list[Mutant]) -> tuple[list[Mutant], list[str]]:
    """The changes of an earlier sample in today's code, and those that it no longer has."""
    found: dict[tuple[str, str, str, int], Mutant] = {}
    lost: list[str] = []
    for was in earlier:
        alike = (
            lambda m, w=was: (
                m.key == (w["file"], w["function"], w["operator"], w["ordinal"]) and m.before == w["before"]
            ),
            lambda m, w=was: (
                (m.function, m.operator, m.before) == (w["function"], w["operator"], w["before"])
            ),
            lambda m, w=was: (m.operator, m.before, m.after) == (w["operator"], w["before"], w["after"]),
            lambda m, w=was: m.key == (w["file"], w["function"], w["operator"], w["ordinal"]),
        )
        free = [m for m in possible if m.key not in found]
        match = next((m for test in alike for m in free if test(m)), None)
        if match is None:
            lost.append(
                f"{was['file']} {was['function']} {was['operator']} {was['ordinal']}: {was['before']}"
            )
        else:
            found[match.key] = match
    return list(found.values()), lost


# --- running the tests -----------------------------------------------------------------------------------
@dataclass(kw_only=True)
class Reach:
    """What one test costs, and which lines of the four modules it executes."""

    seconds: float = 0.0
    passed: bool = True
    lines: set[tuple[str, int]] = field(default_factory=set)


class HitsBeforeStatements(ast.NodeTransformer):
    """Puts a call before every statement of a function, which notes the statement's line."""

    def __init__(self, file: str) -> None:
        self.file = file

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        for part in ast.walk(node):
            for name in ("body", "orelse", "finalbody"):
                if isinstance(statements := getattr(part, name, None), list) and statements:
                    setattr(part, name, [each for s in statements for each in (self.hit(s.lineno), s)])
        return ast.fix_missing_locations(node)

    def hit(self, line: int) -> ast.stmt:
        return ast.parse(f"__hits__.add(({self.file!r}, {line}))").body[0]


class Tracer:
    """Records a `Reach` for every test."""

    def __init__(self) -> None:
        self.hits: set[tuple[str, int]] = set()
        self.reaches: dict[str, Reach] = {}

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.hits.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        reach = self.reaches.setdefault(report.nodeid, Reach())
        reach.seconds += report.duration
        reach.passed = reach.passed and not report.failed

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.reaches[nodeid].lines |= self.hits

    def run(self, session: Any) -> object:
        session.config.pluginmanager.register(self)
        vars(builtins)["__hits__"] = self.hits
        for file in (file for files in SOURCES.values() for file in files):
            tree = HitsBeforeStatements(file).visit(ast.parse(Path(file).read_text()))
            replace_code(file, compile(tree, str(Path.cwd() / file), "exec"))
        run_tests(session.items)
        return {name: [r.seconds, r.passed, sorted(r.lines)] for name, r in self.reaches.items()}


class FirstFailure:
    """Makes one change and runs the given tests; the result is the name of the first that fails."""

    def __init__(self, mutant: Mutant, chosen: list[str]) -> None:
        self.mutant = mutant
        self.chosen = chosen
        self.killer = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.killer:
            self.killer = report.nodeid

    def run(self, session: Any) -> object:
        session.config.pluginmanager.register(self)
        raw, mutant = Path(self.mutant.file).read_bytes(), self.mutant
        text = raw[: mutant.start] + mutant.after.encode() + raw[mutant.end :]
        replace_code(mutant.file, compile(text, str(Path.cwd() / mutant.file), "exec"), mutant.line)
        items = {item.nodeid: item for item in session.items}
        run_tests([items[name] for name in self.chosen], until=lambda: bool(self.killer))
        return self.killer


def run_tests(items: list[Any], until: Callable[[], bool] = lambda: False) -> None:
    for item, following in zip_longest(items, items[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if until():
            return


def replace_code(file: str, changed: CodeType, last: float = math.inf) -> None:
    """Puts the changed code into the function objects that were made from the original.

    What begins below the line `last` may have moved to another line, and is as it was.
    """
    codes = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(changed)}
    for function in [f for f in gc.get_objects() if type(f) is FunctionType]:
        code = function.__code__
        if code.co_filename == changed.co_filename and code.co_firstlineno <= last:
            function.__code__ = codes[code.co_qualname, code.co_firstlineno]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


def in_child(session: Any, task: Tracer | FirstFailure, limit: float) -> Any:
    """Runs the task in a forked child; returns its result, or None when the limit has passed."""
    answer = Path(".answer")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            answer.write_text(json.dumps(task.run(session)))
        except BaseException:
            say(traceback.format_exc())
        finally:
            os._exit(0)
    until = time.monotonic() + limit
    try:
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > until:
                return None
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return json.loads(answer.read_text())


def traced(session: Any) -> dict[str, Reach]:
    rows = in_child(session, Tracer(), 3600)
    reaches = {
        name: Reach(seconds=seconds, passed=passed, lines={(file, line) for file, line in lines})
        for name, (seconds, passed, lines) in rows.items()
    }
    failed = [name for name, reach in reaches.items() if not reach.passed]
    if failed:
        say(f"not used, for they fail without any change: {failed}")
    return {name: reach for name, reach in reaches.items() if reach.passed}


def judge(session: Any, mutant: Mutant, reaches: dict[str, Reach]) -> None:
    """Runs the tests that execute the changed line, quick ones first; the outcome is in the mutant."""
    chosen = [name for name, r in reaches.items() if (mutant.file, mutant.statement) in r.lines]
    chosen.sort(key=lambda name: reaches[name].seconds)
    limit = 20 + 3 * sum(reaches[name].seconds for name in chosen)
    killer = in_child(session, FirstFailure(mutant, chosen), limit)
    mutant.outcome = "timeout" if killer is None else "killed" if killer else "survived"
    mutant.killer = killer or ""


class Loop:
    """A pytest plugin: in place of running the collected tests, it judges the changes."""

    def __init__(self, judged: list[Mutant], write: Callable[[], None]) -> None:
        self.judged = judged
        self.write = write

    def pytest_runtestloop(self, session: Any) -> bool:
        reaches = traced(session)
        say(f"{len(reaches)} tests, {sum(r.seconds for r in reaches.values()):.0f} s")
        for number, mutant in enumerate(self.judged, 1):
            if mutant.outcome:
                continue
            started = time.monotonic()
            judge(session, mutant, reaches)
            shutil.rmtree(".hypothesis", ignore_errors=True)  # each change is met with the same examples
            seconds = time.monotonic() - started
            say(f"{number}/{len(self.judged)} {seconds:.1f} s {mutant.outcome} {mutant.key}")
            self.write()
        return True


def say(words: str) -> None:
    os.write(LOG, f"{words}\n".encode())


# --- the whole -------------------------------------------------------------------------------------------
def figures(judged: list[Mutant], seed: int, commit: str, lost: list[str]) -> dict[str, Any]:
    def of(name: str | None) -> dict[str, Any]:
        outcomes = [m.outcome for m in judged if name in (None, m.module)]
        killed = sum(outcome in ("killed", "timeout") for outcome in outcomes)
        return {
            "mutants": len(outcomes),
            "killed": killed,
            "survived": len(outcomes) - killed,
            "score": round(killed / len(outcomes), 3) if outcomes else None,
        }

    return {
        "benchmark": "mutation",
        "commit": commit,
        "seed": seed,
        **of(None),
        "modules": {name: of(name) for name in SOURCES},
        "lost": len(lost),
    }


def whole(judged: list[Mutant], seed: int, commit: str, lost: list[str]) -> dict[str, Any]:
    """What the output file holds."""
    rows = [{k: v for k, v in asdict(m).items() if k not in ("start", "end")} for m in judged]
    alive = [row for row in rows if row["outcome"] == "survived"]
    summary = figures([m for m in judged if m.outcome], seed, commit, lost)
    return {"summary": summary, "survivors": alive, "lost": lost, "all": rows}


def take_over(judged: list[Mutant], earlier: dict[str, Any], commit: str) -> None:
    """Takes the outcomes of a run that was ended before its last change."""
    if (was := earlier["summary"]["commit"]) != commit:
        sys.exit(f"the output file is of commit {was}, this is {commit}: name another --output")
    rows = {(row["file"], row["function"], row["operator"], row["ordinal"]): row for row in earlier["all"]}
    for mutant in judged:
        if row := rows.get(mutant.key):
            mutant.outcome, mutant.killer = row["outcome"], row["killer"]


def chosen_mutants(options: argparse.Namespace) -> tuple[list[Mutant], list[str]]:
    judged: list[Mutant] = []
    lost: list[str] = []
    earlier = json.loads(Path(options.like).read_text())["all"] if options.like else []
    for module, files in SOURCES.items():
        possible = [m for file in files for m in mutants(module, file, Path(file).read_text())]
        if options.like:
            some, gone = corresponding([was for was in earlier if was["module"] == module], possible)
            lost.extend(gone)
        else:
            some = sample(module, possible, options.number // len(SOURCES), options.seed)
        say(f"{module}: {len(some)} of {len(possible)} possible changes")
        judged.extend(some)
    return judged, lost


def enter_copy(folder: str, commit: str) -> None:
    """Makes the copy of the commit the current folder and the one that Python imports from."""
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    os.chdir(folder)
    paths = [str(Path.cwd() / name) for name in ("operator", "runtime", "dev", ".")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument(
        "--like", type=os.path.abspath, help="an earlier output: sample the corresponding changes"
    )
    parser.add_argument("--output", type=os.path.abspath, required=True)
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files and folders of tests")
    options = parser.parse_args()
    words = ["git", "rev-parse", options.commit]
    commit = subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        enter_copy(os.path.realpath(folder), commit)
        judged, lost = chosen_mutants(options)
        output = Path(options.output)
        if output.exists():
            take_over(judged, json.loads(output.read_text()), commit)

        def write() -> None:
            output.write_text(json.dumps(whole(judged, options.seed, commit, lost), indent=1) + "\n")

        tests = [found for pattern in options.tests for found in glob.glob(pattern)]
        words = ["-p", "no:cacheprovider", "--hypothesis-seed=0", *SEARCHES, *tests]
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            code = pytest.main(words, plugins=[Loop(judged, write)])
        os.chdir(REPOSITORY)
    if code != 0:
        sys.exit(f"pytest ended with {code}; the same command goes on from {output}")
    before = {"before": json.loads(Path(options.like).read_text())["summary"]} if options.like else {}
    print(json.dumps(figures(judged, options.seed, commit, lost) | before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
