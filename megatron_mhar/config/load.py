"""Config files: YAML in, with ``base`` files and overrides; one clear error; resolved YAML out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from megatron_mhar.config.schema import RunConfig
from megatron_mhar.errors import UserError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run config.

    A file may name others by ``base: recipe.yaml`` (or a list of them, relative to the file): they are read first and
    the file's own keys win, section by section. Lists are replaced, not joined.

    Args:
        path: YAML file.
        overrides: ``dot.path=value`` each, the value in YAML; they win over all files, the last one over earlier ones.

    Raises:
        UserError: one line for each mistake, with the file and line (or the override), the key, what was given and
            what is allowed.
    """
    root = _read_file(path, ())
    for override in overrides:
        _apply_override(root, override)
    try:
        # Strict JSON is the stricter half of pydantic: no true for 1, no "8" for 8, yet a list for a tuple.
        return RunConfig.model_validate_json(json.dumps(root.plain()), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A list with a wrong item is also reported as a wrong list: the item says it better.
    inner = {detail["loc"][:end] for detail in details for end in range(len(detail["loc"]))} - {()}
    lines = [_describe(root, detail) for detail in details if detail["loc"] not in inner]
    if len(lines) > 1:
        lines = [f"{len(lines)} mistakes in the config:", *(f"  {line}" for line in lines)]
    raise UserError("\n".join(lines))


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML, every key present; :func:`load_config` makes an equal config of it."""
    values = config.model_dump(mode="json")
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def flatten(config: RunConfig) -> dict[str, object]:
    """Every key by its dotted path, as plain JSON values, in the schema's order."""

    def walk(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(walk(config.model_dump(mode="json"), ""))


# --- YAML ---------------------------------------------------------------------------------------------------------

_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map"))
_FLOAT = ("tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


class _Loader(yaml.SafeLoader):
    """Plain data: text, numbers, true/false, null, lists and sections.

    As in YAML 1.2, ``5e-4`` is a number and a date is text. Aliases are refused: every value stands in one place.
    """

    yaml_constructors = {
        tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in _TAGS
    }
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "aliases (*name) are not supported", self.peek_event().start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes text that :class:`_Loader` would read as a number."""


_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


@dataclass
class _Node:
    """A value and where it was given: ``file:line``, or the override."""

    value: Any  # dict[str, _Node] for a section, else plain data
    origin: str

    def plain(self) -> Any:
        """The value without origins."""
        return {k: v.plain() for k, v in self.value.items()} if isinstance(self.value, dict) else self.value

    def merge(self, above: _Node) -> None:
        """Lay ``above`` over this node; its keys win."""
        if isinstance(self.value, dict) and isinstance(above.value, dict):
            for key, node in above.value.items():
                if key in self.value:
                    self.value[key].merge(node)
                else:
                    self.value[key] = node
        else:
            self.value = above.value
        self.origin = above.origin

    def find_origin(self, path: Sequence[str]) -> str:
        """Where the key at ``path``, or else the nearest section around it, was given."""
        node = self
        for key in path:
            if not isinstance(node.value, dict) or key not in node.value:
                break
            node = node.value[key]
        return node.origin


def _parse(text: str, name: str, *, with_lines: bool) -> _Node:
    """YAML as a node; errors and origins carry ``name`` and, of a file, the line."""

    def where(mark: yaml.Mark | None) -> str:
        return f"{name}:{mark.line + 1}" if with_lines and mark is not None else name

    def convert(loader: _Loader, node: yaml.Node) -> _Node:
        origin = where(node.start_mark)
        if not isinstance(node, yaml.MappingNode):
            try:
                return _Node(loader.construct_object(node, deep=True), origin)
            except ValueError as error:  # an explicit tag such as !!int abc
                raise UserError(f"{origin}: {error}") from None
        if node.tag not in _TAGS:
            raise ConstructorError(None, None, f"tag {node.tag!r} is not supported", node.start_mark)
        section: dict[str, _Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
                raise UserError(f"{where(key_node.start_mark)}: a key must be a name")
            key, key_origin = key_node.value, where(key_node.start_mark)
            if key in section:
                raise UserError(f"{key_origin}: {key}: given twice, the first time at {section[key].origin}")
            section[key] = _Node(convert(loader, value_node).value, key_origin)
        return _Node(section, origin)

    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return _Node(None, name) if node is None else convert(loader, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        parts = [part for part in (error.context, error.problem) if part]
        raise UserError(f"{where(mark)}: not YAML: {', '.join(parts)}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{name}: not YAML: {' '.join(str(error).split())}") from None


def _read_file(path: Path, including: tuple[Path, ...]) -> _Node:
    """A file laid over its base files; ``including`` are the files whose ``base`` led here."""
    by = f" (base of {including[-1]})" if including else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file{by}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the config file{by}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not YAML: no UTF-8 text (byte {error.start}){by}") from None
    node = _parse(text, str(path), with_lines=True)
    if not isinstance(node.value, dict):
        given = "nothing" if node.value is None else _show(node.value)
        raise UserError(f"{node.origin}: {given} given, but a config file holds sections of keys{by}")
    node.origin = str(path)  # what is missing altogether stands on no line

    bases = node.value.pop("base", None)
    if bases is None:
        return node
    names = [bases.value] if isinstance(bases.value, str) else bases.value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        given = _show(bases.plain())
        raise UserError(f"{bases.origin}: base: {given} given, but it must be a file name or a list of file names")
    chain = (*including, path)
    root = _Node({}, str(path))
    for name in names:
        base = path.parent / name
        if base.resolve() in {file.resolve() for file in chain}:
            circle = " -> ".join(map(str, (*chain, base)))
            raise UserError(f"{bases.origin}: base: {name} leads back to itself: {circle}")
        root.merge(_read_file(base, chain))
    root.merge(node)
    return root


def _override_origin(override: str) -> str:
    return f"command line: {override}"


def _apply_override(root: _Node, override: str) -> None:
    """Set one ``dot.path=value``."""
    key, equals, text = override.partition("=")
    origin = _override_origin(override)
    path = key.strip().split(".")
    if not equals or not all(path):
        raise UserError(f"{origin}: an override is written dot.path=value, for example optimizer.lr=5e-4")
    if not text.strip():
        raise UserError(f"{origin}: no value given; nothing at all is written {key}=null")
    above = _parse(text, origin, with_lines=False)
    node = root
    for name in path:
        if not isinstance(node.value, dict):
            node.value, node.origin = {}, origin
        node = node.value.setdefault(name, _Node({}, origin))
    section_origin = node.origin
    node.merge(above)
    if isinstance(node.value, dict):
        node.origin = section_origin


# --- words --------------------------------------------------------------------------------------------------------

_PYDANTIC_WORDS = {
    "Input should be": "it must be",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid array": "a list",
    "an object": "a section of keys",
}


def _describe(root: _Node, detail: ErrorDetails) -> str:
    """One of pydantic's errors in a line: where, which key, what was given, what is allowed."""
    path = [str(part) for part in detail["loc"]]
    given = f"{_show(detail['input'])} given"
    match detail["type"]:
        case "config_problem":
            at, text = detail["ctx"]["at"], detail["ctx"]["message"]
            text = text.removeprefix(f"{at}: ")
            path += at.split(".")
        case "extra_forbidden":
            text = f"unknown key; {_advice(path, is_section=isinstance(detail['input'], dict))}"
        case "missing":
            field = _fields().get(".".join(path))
            about = f" ({field.description})" if field is not None and field.description else ""
            text = f"missing, and it has no default{about}"
        case "too_short":
            text = f"{given}, but it needs at least {detail['ctx']['min_length']}"
        case _:
            wanted = detail["msg"]
            for theirs, ours in _PYDANTIC_WORDS.items():
                wanted = wanted.replace(theirs, ours)
            text = f"{given}, but {wanted}"
    key, origin = ".".join(path), root.find_origin(path)
    return f"{origin}: {text}" if origin.startswith(_override_origin(f"{key}=")) else f"{origin}: {key}: {text}"


def _show(value: object) -> str:
    """A value as it may stand in YAML, cut to fit a line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _fields() -> dict[str, FieldInfo]:
    """Every key of the schema by its dotted path, sections too."""

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in model.model_fields.items():
            yield prefix + name, field
            for kind in (field.annotation, *get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    yield from walk(kind, f"{prefix}{name}.")

    return dict(walk(RunConfig, ""))


def _advice(path: Sequence[str], *, is_section: bool) -> str:
    """What may have been meant by an unknown key, else what is allowed in its section."""
    given = ".".join(path)
    known = _fields()
    sections = {key.rpartition(".")[0] for key in known}

    def likeness(key: str) -> float:
        whole = SequenceMatcher(None, given, key).ratio()
        last = SequenceMatcher(None, path[-1], key.rpartition(".")[2]).ratio()
        return whole + last

    nearest = max((key for key in known if (key in sections) == is_section), key=likeness)
    if likeness(nearest) >= 1.25:
        return f"did you mean {nearest}?"
    section = given.rpartition(".")[0]
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    return f"allowed{f' in {section}' if section else ''}: {', '.join(siblings)}"
