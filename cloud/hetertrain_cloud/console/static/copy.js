// Text to be taken elsewhere: a button copies it; where the browser lets nobody, it is chosen.

export default {
  props: { text: String, label: String },
  data() {
    return { said: "" };
  },
  methods: {
    async copy() {
      try {
        await navigator.clipboard.writeText(this.text);
        this.said = "Copied";
      } catch {
        getSelection().selectAllChildren(this.$refs.text);
        this.said = "Press Ctrl+C";
      }
      clearTimeout(this.timer);
      this.timer = setTimeout(() => (this.said = ""), 4000);
    },
  },
  unmounted() {
    clearTimeout(this.timer);
  },
  render() {
    const { h } = Vue;
    const icon = h("i", { class: "material-icons", "aria-hidden": "true" }, this.said === "Copied" ? "check" : "content_copy");
    const button = h("button", { type: "button", class: "button button-small", "aria-label": `Copy: ${this.label}`, onClick: this.copy }, [icon, "Copy"]);
    return h("div", { class: "copy" }, [
      h("div", { class: "copy-row" }, [
        h("strong", this.label),
        h("span", { class: "hint", role: "status" }, this.said),
        button,
      ]),
      h("pre", { ref: "text" }, this.text),
    ]);
  },
};
