// Text with long dotted names, as of signals: where it is too long for its place, it is broken behind a dot.
import { breakable } from "/console/static/format.js";

export default {
  props: { text: String },
  render() {
    return Vue.h("span", breakable(this.text));
  },
};
