"""Layouts that are built on the device that reads them: of selections, and by arithmetic."""
