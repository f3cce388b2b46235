# Draws scaling.svg from scaling.dat in the current folder: efficiency of strong and weak scaling. Called by scaling.sh.
set terminal svg noenhanced size 900,420 font "Helvetica,13" background "white"
set output "scaling.svg"
set style data histograms
set style histogram clustered gap 1
set style fill solid 0.9 border -1
set datafile missing "NaN"
top = 100
do for [column = 2:3] {
    stats "scaling.dat" using (valid(column) ? column(column) : 0) nooutput
    top = STATS_max > top ? STATS_max : top
}
set yrange [0:top * 1.12]
set ytics 20
set grid y lc rgb "#dddddd"
set xtics nomirror rotate by 20 right font ",12"
set tmargin 5
set bmargin 5
set key at screen 0.98,0.9 right reverse Left samplen 1 horizontal
set multiplot layout 1,2 title "efficiency over ranks: speed / (speed of 1 rank * ranks, at most the cores), %" font ",15"
array titles[2] = ["train_mlp", "train_gpt"]
do for [model = 1:2] {
    set title titles[model] font ",13" offset screen -0.15,0
    plot "scaling.dat" index model - 1 using 2:xtic(1) title "ddp" lc rgb "#0072b2", \
         "" index model - 1 using 3 title "PyTorch DDP over Gloo" lc rgb "#e69f00", \
         100 with lines lc rgb "#000000" notitle, \
         "" index model - 1 using ($0 - 0.17):2:(sprintf("%.0f", $2)) with labels offset 0,0.6 font ",11" notitle, \
         "" index model - 1 using ($0 + 0.17):3:(sprintf("%.0f", $3)) with labels offset 0,0.6 font ",11" notitle
    unset key
}
unset multiplot
