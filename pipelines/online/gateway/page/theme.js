// Sets the colour scheme: the last choice in this browser, else the system's. Not a module, so that it runs before the
// first paint. The class "starting" hides the sections below until the models table has its rows, to avoid a layout
// shift.
{
  document.documentElement.classList.add("starting");
  const chosen = localStorage.getItem("peagle-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
