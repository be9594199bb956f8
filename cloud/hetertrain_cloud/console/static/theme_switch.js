// Dark or light: kept in a cookie, so that the next page comes as it should be.

export default {
  props: { dark: Boolean },
  emits: ["turn"],
  methods: {
    turn() {
      const theme = this.dark ? "light" : "dark";
      document.cookie = `hetertrain_theme=${theme}; path=/console; max-age=31536000; samesite=strict; secure`;
      // The page's own element sets the colours: what another sets, it undoes when anything changes.
      this.$emit("turn", !this.dark);
    },
  },
  render() {
    const { h } = Vue;
    const icon = h("i", { class: "material-icons", "aria-hidden": "true" }, this.dark ? "light_mode" : "dark_mode");
    const label = this.dark ? "Light colours" : "Dark colours";
    return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onClick: this.turn }, icon);
  },
};
