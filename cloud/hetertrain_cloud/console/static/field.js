// A form's field: a label, the browser's own control, a hint, and what is wrong with it.

let counter = 0;

// A time stands in its control in the viewer's zone and without one; all others have it in UTC.
function seen(kind, value) {
  const at = new Date(value);
  if (kind !== "datetime-local" || Number.isNaN(at.getTime())) return value;
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

function meant(kind, value) {
  const at = new Date(value);
  return kind !== "datetime-local" || Number.isNaN(at.getTime()) ? value : at.toISOString();
}

export default {
  props: {
    label: String,
    kind: { type: String, default: "text" },
    value: [String, Number, Boolean],
    options: Array,
    hint: String,
    error: String,
    placeholder: String,
    required: Boolean,
    disabled: Boolean,
    quiet: Boolean,
    rows: Number,
    least: Number,
    most: Number,
    step: [Number, String],
    autocomplete: { type: String, default: "off" },
    inputmode: String,
    focused: Number,
  },
  emits: ["value", "settle", "enter"],
  data() {
    counter += 1;
    return { own: seen(this.kind, this.value), key: `field-${counter}` };
  },
  watch: {
    value(value) {
      this.own = seen(this.kind, value);
    },
    // Counted, not set: a field may be called to again and again.
    async focused() {
      await Vue.nextTick();
      const fold = this.$el.closest("details");
      if (fold) fold.open = true;
      this.$el.scrollIntoView({ block: "center" });
      this.focus();
    },
  },
  methods: {
    change(value) {
      this.own = value;
      this.$emit("value", meant(this.kind, value));
    },
    settle(value) {
      this.own = value;
      this.$emit("settle", meant(this.kind, value));
    },
    focus() {
      this.$refs.control?.focus();
    },
    control() {
      const { h } = Vue;
      const notes = [this.hint && `${this.key}-hint`, this.error && `${this.key}-error`].filter(Boolean);
      const common = {
        id: this.key,
        ref: "control",
        disabled: this.disabled,
        required: this.required,
        "aria-invalid": this.error ? "true" : undefined,
        "aria-describedby": notes.join(" ") || undefined,
      };
      if (this.kind === "select") {
        const options = (this.options || []).map(([value, text]) =>
          h("option", { value, selected: value === this.own }, text),
        );
        return h("select", { ...common, value: this.own, onChange: (e) => this.settle(e.target.value) }, options);
      }
      if (this.kind === "checkbox") {
        const onChange = (e) => this.settle(e.target.checked);
        return h("input", { ...common, type: "checkbox", checked: Boolean(this.own), onChange });
      }
      const typed = {
        ...common,
        value: this.own,
        placeholder: this.placeholder,
        autocomplete: this.autocomplete,
        inputmode: this.inputmode,
        onInput: (e) => this.change(e.target.value),
        onChange: (e) => this.settle(e.target.value),
      };
      if (this.kind === "textarea") return h("textarea", { ...typed, rows: this.rows || 8, spellcheck: false });
      return h("input", {
        ...typed,
        type: this.kind,
        min: this.least,
        max: this.most,
        step: this.step,
        spellcheck: false,
        onKeydown: (e) => e.key === "Enter" && this.$emit("enter", e.target.value),
      });
    },
  },
  render() {
    const { h } = Vue;
    const label = h("label", { for: this.key, class: this.quiet ? "unseen" : undefined }, this.label);
    const parts = this.kind === "checkbox" ? [this.control(), label] : [label, this.control()];
    if (this.hint) parts.push(h("p", { class: "hint", id: `${this.key}-hint` }, this.hint));
    if (this.error) parts.push(h("p", { class: "error", id: `${this.key}-error`, role: "alert" }, this.error));
    return h("div", { class: ["field", `field-${this.kind}`] }, parts);
  },
};
