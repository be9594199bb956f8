"""The form of a job, new or changed: by fields or as TOML, two sights of the same."""

from __future__ import annotations

from typing import Any

from nicegui.element import Element

from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ProblemAnswer
from hetertrain_cloud.console.elements import Field, button, card, facts, link, tag
from hetertrain_cloud.console.forms import focus_faulty
from hetertrain_cloud.console.specification import (
    SECTIONS,
    Form,
    Option,
    Specification,
    entries_of,
    form_of,
    line_of,
    read_entries,
    read_toml,
    refusals,
    without_defaults,
    write_toml,
)
from hetertrain_cloud.console.view import Screen, View, crumbs, to

KINDS = {"choice": "select", "switch": "checkbox", "lines": "textarea", "pairs": "textarea"}
INPUT_MODES = {"whole": "numeric", "number": "decimal"}


def more_of(form: Form) -> list[str]:
    """Return the options that stand in no section."""
    placed = {name for _, _, names in SECTIONS for name in names}
    return [name for name in form.options if name not in placed]


def hint_of(option: Option) -> str:
    """Say what an option does, and within which bounds."""
    lines = {"lines": "One a line.", "pairs": "One a line, KEY=VALUE."}
    parts = (option.description, lines.get(option.kind, ""), option.bounds)
    return " ".join(part for part in parts if part)


class SpecificationForm:
    """A specification that is being written, in fields or as TOML: two sights of the same."""

    def __init__(self, form: Form, specification: Specification) -> None:
        self._form = form
        self._is_toml = False
        self._fields: dict[str, Field] = {}
        entries = entries_of(specification, form.options)
        with tag("div", "", "tabs", role="group", aria_label="How it is written"):
            self._tabs = [
                self._tab("Form", is_toml=False),
                self._tab("TOML", is_toml=True),
            ]
        with tag("div", "", "stack") as self._form_side:
            for title, text, names in SECTIONS:
                with card("", "section"):
                    with tag("div"):
                        tag("h2", title)
                        tag("p", text, "hint")
                    with tag("div", "", "stack"):
                        self._section([name for name in names if name in form.options], entries)
                        if "policy" in names:
                            self._more = self._fold(more_of(form), entries)
        with card() as self._toml_side:
            self._text = Field(
                "Specification, as TOML",
                kind="textarea",
                rows=16,
                hint="What is not set has its default. The same file serves 'hetertrain job "
                "create'.",
            )
            with tag("details", "", "fold"):
                tag("summary", "What can be set")
                facts([(o.name, hint_of(o)) for o in form.options.values()])
        self._toml_side.set_visibility(False)
        self._suggest()

    def read(self) -> Specification | None:
        """Return what stands there; None: something is wrong, and said where."""
        specification, errors = self.found()
        self.complain(errors)
        return None if errors else specification

    def found(self) -> tuple[Specification, dict[str, str]]:
        """Return what of it can be read, and what is wrong with which option; "": with all."""
        if self._is_toml:
            try:
                return read_toml(str(self._text.value)), {}
            except ValueError as error:
                return {}, {"": str(error)}
        entries = {name: field.value for name, field in self._fields.items()}
        return read_entries(entries, self._form.options)

    @property
    def fields(self) -> list[Field]:
        """The fields that are seen, from the top down."""
        return [self._text] if self._is_toml else list(self._fields.values())

    def complain(self, errors: dict[str, str]) -> None:
        """Say what is wrong with which option; nothing is with the others."""
        if self._is_toml:
            self._text.complain(" ".join(map(self._with_line, errors.items())))
            return
        for name, field in self._fields.items():
            field.complain(words.sentence(errors[name]) if name in errors else "")
        if any(name in errors for name in more_of(self._form)):
            self._more._props["open"] = True
            self._more.update()

    def _with_line(self, error: tuple[str, str]) -> str:
        name, message = error
        if not name:
            return words.sentence(message)
        line = line_of(str(self._text.value), name)
        at = "" if line is None else f"line {line}, "
        return words.sentence(f"{at}{name}: {message}")

    def _tab(self, label: str, *, is_toml: bool) -> Element:
        tab = tag("button", label, "tab", type="button")
        tab._props["aria-pressed"] = "false" if is_toml else "true"
        return tab.on("click", lambda: self._switch(is_toml=is_toml))

    def _switch(self, *, is_toml: bool) -> None:
        """Show the other sight of what stands here, if it can be read."""
        if is_toml is self._is_toml:
            return
        specification = self.read()
        if specification is None:
            return
        if is_toml:
            self._text.set(write_toml(specification))
        else:
            unknown = dict.fromkeys(specification.keys() - self._fields, "there is no such option")
            if unknown:
                self.complain(unknown)
                return
            for name, entry in entries_of(specification, self._form.options).items():
                self._fields[name].set(entry)
            self._suggest()
        self._is_toml = is_toml
        self._form_side.set_visibility(not is_toml)
        self._toml_side.set_visibility(is_toml)
        for tab, is_it in zip(self._tabs, (not is_toml, is_toml), strict=True):
            tab._props["aria-pressed"] = "true" if is_it else "false"
            tab.update()

    def _fold(self, names: list[str], entries: dict[str, Any]) -> Element:
        is_open = any(entries[name] != self._form.options[name].default for name in names)
        with tag("details", "", "fold") as fold:
            if is_open:
                fold._props["open"] = True
            tag("summary", "More options")
            self._section(names, entries)
        return fold

    def _section(self, names: list[str], entries: dict[str, Any]) -> None:
        with tag("div", "", "form"):
            for name in names:
                option = self._form.options[name]
                self._fields[name] = field = self._field(option, entries[name])
                if option.kind in ("lines", "pairs"):
                    field.classes("form-wide")

    def _field(self, option: Option, entry: str | bool) -> Field:
        more: dict[str, Any] = {}
        if option.kind == "choice":
            more["options"] = [(choice, choice) for choice in option.choices]
        if option.kind in INPUT_MODES:
            more["inputmode"] = INPUT_MODES[option.kind]
        if option.kind in ("lines", "pairs"):
            more["rows"] = 3
        if option.is_required:
            more["required"] = True
        if option.name == "policy":
            more["on_value"] = lambda _scheme: self._suggest()
        return Field(
            option.label,
            entry,
            kind=KINDS.get(option.kind, "text"),
            hint=hint_of(option),
            example=option.example,
            **more,
        )

    def _suggest(self) -> None:
        """Show what the scheme has where nothing is set."""
        scheme = str(self._fields["policy"].value) if "policy" in self._fields else ""
        for name, field in self._fields.items():
            unset = self._form.unset(name, scheme)
            if unset:
                field.suggest(f"by the scheme: {unset}")


async def build_new(view: View) -> None:
    """Make the screen of a new job."""
    form = await form_of(view.api)
    crumbs(("Jobs", "/jobs"), here="new")
    view.head("New job")
    with card("", "section"):
        with tag("div"):
            tag("h2", "Name")
            tag("p", "It stays as it is.", "hint")
        with tag("div", "", "form"):
            name = Field(
                "Name of the job",
                required=True,
                hint="Letters, digits, dots, dashes and underscores.",
                example="driving",
            )
    written = SpecificationForm(form, {})

    async def create(*, is_started: bool) -> None:
        specification, errors = written.found()
        chosen = str(name.value).strip()
        if not chosen:
            errors["name"] = "this is needed"
        # What is wrong already is sent without a name, which is refused: so all is said at once.
        body = {"name": "" if errors else chosen, "specification": specification}
        try:
            await view.api.send("POST", "/jobs", body)
        except ProblemAnswer as problem:
            refused = {} if "" in errors else refusals(problem.errors)
            if errors:
                refused.pop("name", None)
            if problem.code == "job_exists":
                refused["name"] = problem.detail
            errors = refused | errors
            wrong = errors.pop("name", "")
            name.complain(words.sentence(wrong) if wrong else "")
            written.complain(errors)
            focus_faulty([name, *written.fields])
            view.say(_said(problem), is_bad=True)
            return
        if is_started:
            await view.attempt(view.api.send("POST", f"/jobs/{chosen}/start"), "It starts.")
        view.go(f"/jobs/{chosen}")

    with tag("div", "", "actions"):
        button("Create and start", lambda: create(is_started=True), "button-primary", "play_arrow")
        button("Create", lambda: create(is_started=False))
        link("Cancel", to("/jobs"), "button")


async def build_edit(view: View) -> None:
    """Make the screen that changes a job."""
    name = view.path["name"]
    path = f"/jobs/{name}"
    job = await view.api.get(path)
    form = await form_of(view.api)
    crumbs(("Jobs", "/jobs"), (name, path), here="edit")
    view.head(f"Edit {name}")
    if job["wanted"] == "running":
        with tag("div", "", "callout"):
            tag("span", "It runs: what is changed here holds from its next start on.")
    written = SpecificationForm(form, without_defaults(job["specification"], form.options))

    async def save() -> None:
        specification = written.read()
        if specification is None:
            focus_faulty(written.fields)
            view.say("Some entries cannot be used: see what is marked.", is_bad=True)
            return
        try:
            await view.api.send("PUT", path, specification, if_match=job["revision"])
        except ProblemAnswer as problem:
            fixed = {"task": problem.detail} if problem.code == "task_fixed" else {}
            written.complain(refusals(problem.errors) | fixed)
            focus_faulty(written.fields)
            view.say(_said(problem), is_bad=True)
            return
        view.go(path)

    with tag("div", "", "actions"):
        button("Save", save, "button-primary")
        link("Cancel", to(path), "button")


def _said(problem: ProblemAnswer) -> str:
    if problem.code == "changed_meanwhile":
        return "Somebody else changed it meanwhile. Reload the page, then change it."
    if problem.errors:
        return "It was not taken: see what is marked."
    return problem.detail


NEW = Screen("/new-job", "New job", build_new, "jobs:write", below="/jobs")
EDIT = Screen("/jobs/{name}/edit", "Edit job", build_edit, "jobs:write", below="/jobs")
