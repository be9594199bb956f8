// A time in the viewer's zone: how long ago, or the date; the exact time on hover.
import { ago, exact, moment } from "/console/static/format.js";

export default {
  props: { at: String, form: { type: String, default: "ago" } },
  data() {
    return { now: Date.now() };
  },
  mounted() {
    this.ticker = setInterval(() => (this.now = Date.now()), 1000);
  },
  unmounted() {
    clearInterval(this.ticker);
  },
  render() {
    const { h } = Vue;
    if (!this.at) return h("span", { class: "moment" }, "never");
    const at = new Date(this.at);
    const text = this.form === "date" ? moment(at) : ago(at, this.now);
    return h("time", { class: "moment", datetime: this.at, title: exact(at) }, text);
  },
};
