// Keeps the address of the page in step with what it shows, so that it can be shared and reloaded.

export default {
  props: { query: String },
  watch: {
    query(query) {
      history.replaceState(history.state, "", location.pathname + (query ? `?${query}` : ""));
    },
  },
  render() {
    return null;
  },
};
