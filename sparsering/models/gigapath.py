"""Prov-GigaPath's slide encoder under its public name; the code is in integrations/gigapath/."""

from ..integrations.gigapath import ARCHITECTURES as ARCHITECTURES
from ..integrations.gigapath import FILE as FILE
from ..integrations.gigapath import LEAST_ROWS as LEAST_ROWS
from ..integrations.gigapath import SlideEmbedding, SlideEncoder, load, segment_lengths

__all__ = ["SlideEmbedding", "SlideEncoder", "load", "segment_lengths"]
