// No page can be fetched from disk: the search lists pages there without their text, and no errors.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
