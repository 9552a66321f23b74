// Fills the list of versions with what the site's versions.js names, and leads to the same page of
// the chosen one, or to its first page. Scripts are loaded from disk too, where no JSON can be fetched.
(() => {
  if (typeof siteVersions === "undefined") return; // these pages are no part of a site
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const here = root.pathname.split("/").at(-2); // "stable", "0.3"
  const page = location.pathname.slice(root.pathname.length);
  const select = document.getElementById("versions");
  for (const folder of ["stable", ...Object.keys(siteVersions.pages)]) {
    const isStable = folder === "stable";
    const label = isStable ? `stable (${siteVersions.stable})` : folder;
    const pages = siteVersions.pages[isStable ? siteVersions.stable : folder];
    const target = pages.includes(page) ? page : "index.html";
    const address = new URL(`../${folder}/${target}`, root).href;
    select.add(new Option(label, address, folder === here, folder === here));
  }
  select.addEventListener("change", () => location.assign(select.value));
  select.parentElement.hidden = false;
})();
