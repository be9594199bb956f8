// A table of what the server sends: each kind of cell is written in one place, as text and never as
// markup, and on a narrow screen each row is a card.
import { ago, breakable, bytes, exact, moment, number, seconds } from "/console/static/format.js";

function time(value, form) {
  if (value === "now") return "now";
  const at = new Date(value);
  return Vue.h("time", { datetime: value, title: exact(at) }, form === "date" ? moment(at) : ago(at));
}

function note(value) {
  return value.note ? Vue.h("span", { class: "note" }, breakable(value.note)) : null;
}

const CELLS = {
  text: (value) => breakable(value),
  number: (value) => number(value),
  bytes: (value) => bytes(value),
  seconds: (value) => seconds(value),
  time: (value) => time(value),
  date: (value) => time(value, "date"),
  code: (value) => Vue.h("code", String(value)),
  link: (value) => [value.href ? Vue.h("a", { href: value.href }, value.text) : value.text, note(value)],
  pill: (value) => [Vue.h("span", { class: ["pill", `pill-${value.tone}`] }, value.text), note(value)],
  labels: (value) =>
    Object.entries(value).map(([key, text]) => Vue.h("span", { class: "label" }, `${key}=${text}`)),
  list: (value) => value.map((text) => Vue.h("span", { class: "label" }, text)),
  bar: (value) => [
    Vue.h("span", { class: "bar", "aria-hidden": "true" }, [
      Vue.h("span", { class: "bar-fill", style: { width: `${Math.round(100 * Math.min(1, value.share))}%` } }),
    ]),
    Vue.h("span", { class: "bar-text" }, value.text),
  ],
};

export default {
  props: {
    caption: String,
    columns: Array,
    rows: Array,
    chosen: { type: Array, default: () => [] },
    selectable: Boolean,
    sorted: Object,
    actions: { type: Array, default: () => [] },
  },
  emits: ["choose", "sort", "act"],
  methods: {
    choose(keys) {
      this.$emit("choose", keys);
    },
    box(label, checked, onChange) {
      return Vue.h("input", { type: "checkbox", "aria-label": label, checked, onChange });
    },
    head() {
      const { h } = Vue;
      const cells = this.columns.map((column) => {
        if (!column.sort) return h("th", { scope: "col", class: `kind-${column.kind}` }, column.label);
        const isIt = this.sorted?.name === column.name;
        const order = isIt ? (this.sorted.down ? "descending" : "ascending") : "none";
        const onClick = () => this.$emit("sort", column.name);
        const arrow = isIt ? h("i", { class: "material-icons", "aria-hidden": "true" }, this.sorted.down ? "arrow_downward" : "arrow_upward") : null;
        return h("th", { scope: "col", class: `kind-${column.kind}`, "aria-sort": order }, [
          h("button", { type: "button", class: "sorter", onClick }, [column.label, arrow]),
        ]);
      });
      if (this.selectable) {
        const keys = this.rows.map((row) => row.key);
        const isAll = keys.length > 0 && keys.every((key) => this.chosen.includes(key));
        const box = this.box("all on this page", isAll, () => this.choose(isAll ? [] : keys));
        cells.unshift(h("th", { class: "kind-box" }, [box]));
      }
      if (this.actions.length) cells.push(h("th", { scope: "col", class: "kind-actions" }, [h("span", { class: "unseen" }, "actions")]));
      return h("thead", [h("tr", cells)]);
    },
    row(row) {
      const { h } = Vue;
      const cells = this.columns.map((column, index) => {
        const value = row[column.name];
        const isAbsent = value === undefined || value === null || value === "";
        const content = isAbsent ? "–" : (CELLS[column.kind] || CELLS.text)(value);
        const classes = [`kind-${column.kind}`, index === 0 && "is-first", isAbsent && "is-absent"];
        return h("td", { class: classes, "data-label": column.label }, h("span", { class: "cell" }, content));
      });
      if (this.selectable) {
        const isChosen = this.chosen.includes(row.key);
        const others = this.chosen.filter((key) => key !== row.key);
        const box = this.box(String(row.key), isChosen, () => this.choose(isChosen ? others : [...others, row.key]));
        cells.unshift(h("td", { class: "kind-box" }, [box]));
      }
      if (this.actions.length) {
        const buttons = this.actions
          .filter((action) => !row.without?.includes(action.name))
          .map((action) =>
            h("button", {
              type: "button",
              class: ["button", "button-small", action.tone && `button-${action.tone}`],
              "aria-label": `${action.label}: ${row.key}`,
              onClick: () => this.$emit("act", { action: action.name, key: row.key }),
            }, action.label),
          );
        cells.push(h("td", { class: "kind-actions" }, buttons));
      }
      return h("tr", { key: row.key, class: row.tone ? `row-${row.tone}` : undefined }, cells);
    },
  },
  render() {
    const { h } = Vue;
    const caption = h("caption", { class: "unseen" }, this.caption);
    const body = h("tbody", this.rows.map((row) => this.row(row)));
    const classes = ["table", this.columns.some((column) => column.sort) && "table-sortable"];
    return h("div", { class: "table-frame" }, [h("table", { class: classes }, [caption, this.head(), body])]);
  },
};
