// Logs in by the API: the session is a cookie that no script can read.

async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(`/api/v1/${path}`, { method: "POST", headers, body: JSON.stringify(body) });
  if (response.ok) return null;
  const problem = await response.json().catch(() => ({}));
  return problem.detail || `The control plane does not answer (${response.status}).`;
}

function goOn() {
  const wanted = new URLSearchParams(location.search).get("next") || "/console/";
  location.replace(wanted.startsWith("/console/") && !wanted.startsWith("/console//") ? wanted : "/console/");
}

function handle(id, steps) {
  const form = document.getElementById(id);
  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const [button, error] = [form.querySelector("button"), form.querySelector(".error")];
    button.disabled = true;
    error.hidden = true;
    const values = Object.fromEntries(new FormData(form));
    try {
      for (const [path, names] of steps) {
        const body = Object.fromEntries(names.map((name) => [name, values[name]]));
        const refusal = await post(path, body);
        if (refusal) throw new Error(refusal);
      }
      goOn();
    } catch (refusal) {
      error.textContent = refusal.message;
      error.hidden = false;
      button.disabled = false;
    }
  });
}

handle("login", [["sessions", ["name", "password"]]]);
handle("bootstrap", [["bootstrap", ["token", "name", "password"]], ["sessions", ["name", "password"]]]);

if (!document.cookie.includes("hetertrain_theme=")) {
  const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.cookie = `hetertrain_theme=${theme}; path=/console; max-age=31536000; samesite=strict; secure`;
}
if (document.cookie.includes("hetertrain_theme=dark")) document.body.classList.add("body--dark");
