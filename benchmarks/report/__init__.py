"""The page of the tables: what was measured, beside what the prior documents said."""
