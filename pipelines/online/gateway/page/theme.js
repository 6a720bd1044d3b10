// The colour scheme before anything is drawn: what was chosen here last, else the system's. No module, so that it runs
// before the first paint. What is below the live figures waits until their table has its rows, so that nothing moves.
{
  document.documentElement.classList.add("starting");
  const chosen = localStorage.getItem("peagle-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
