// Dark or light: kept in a cookie, so that the next page comes as it should be.

export default {
  props: { dark: Boolean },
  data() {
    return { isDark: this.dark };
  },
  methods: {
    turn() {
      this.isDark = !this.isDark;
      Quasar.Dark.set(this.isDark);
      const theme = this.isDark ? "dark" : "light";
      document.cookie = `hetertrain_theme=${theme}; path=/console; max-age=31536000; samesite=strict; secure`;
    },
  },
  render() {
    const { h } = Vue;
    const icon = h("i", { class: "material-icons", "aria-hidden": "true" }, this.isDark ? "light_mode" : "dark_mode");
    const label = this.isDark ? "Light colours" : "Dark colours";
    return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onClick: this.turn }, icon);
  },
};
